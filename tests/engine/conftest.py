"""What all engine tests share: models with seeded weights, an engine without connector, a real Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_process import Engine, Lab
from seeded_model import write_seeded_llama
from servers import RedisServer, start_redis


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama whose output depends on every token of its prompt."""
    return write_seeded_llama(tmp_path_factory.mktemp("models") / "seeded")


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without connector."""
    engine = Engine(model, tmp_path_factory.mktemp("reference"))
    yield engine
    engine.kill()


@pytest.fixture(scope="session")
def cold(reference: Engine) -> Callable[..., object]:
    """A function that runs a prompt from nothing, without connector."""

    def run(prompt: list[int], max_tokens: int = 8) -> object:
        reference.reset_gpu()
        return reference.one(prompt, max_tokens)

    return run


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path) as lab:
        yield lab


@pytest.fixture(scope="module")
def module_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab for engines that the tests of a module share."""
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()
