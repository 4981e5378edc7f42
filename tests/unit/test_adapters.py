"""Adapters by their content: one root a content, and none where the files do not tell it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fake_engine import wait_until
from tierkv.identity import FileHashes, file_stamp
from tierkv.keys import Extra, Part, chain_keys, next_key, root_key
from tierkv_connector import adapters as adapters_module
from tierkv_connector.adapters import MAX_ADAPTERS, Adapters
from tierkv_connector.filecheck import MAX_THREADS, FileChecks

ROOT = root_key(b"\x01" * 32)


class Lora(NamedTuple):
    """What vLLM says of an adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


@pytest.fixture
def adapters(tmp_path: Path) -> Iterator[Adapters]:
    made = Adapters(FileHashes(tmp_path / "identity.json"), {"dtype": "float32"})
    yield made
    made.close()


def write(path: Path, weights: bytes = b"weights", rank: int = 8) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (path / "README.md").write_text(f"called {path.name}")
    return path


def root(adapters: Adapters, lora: Lora) -> bytes | None:
    """Return the root once the adapter is known."""
    assert adapters.root(ROOT, lora) is None, "nobody waits for the hashing"
    assert adapters.wait(10.0)
    return adapters.root(ROOT, lora)


def test_no_adapter_is_the_models_own_root(adapters: Adapters) -> None:
    assert adapters.root(ROOT, None) == ROOT


def test_the_content_names_an_adapter(adapters: Adapters, tmp_path: Path) -> None:
    first = root(adapters, Lora("a", 1, str(write(tmp_path / "a"))))
    assert first not in (None, ROOT)
    assert root(adapters, Lora("another name", 2, str(write(tmp_path / "b")))) == first, "the same files elsewhere"
    assert root(adapters, Lora("a", 3, str(write(tmp_path / "c", b"weights2")))) not in (None, first)
    assert root(adapters, Lora("a", 4, str(write(tmp_path / "d", rank=16)))) not in (None, first)
    other_model = root_key(b"\x02" * 32)
    assert adapters.root(other_model, Lora("a", 1, str(tmp_path / "a"))) not in (None, first, other_model)


def test_settings_that_change_the_weights_change_the_content(tmp_path: Path) -> None:
    found = set()
    for dtype in ("float32", "bfloat16"):
        adapters = Adapters(FileHashes(tmp_path / "identity.json"), {"dtype": dtype})
        found.add(root(adapters, Lora("a", 1, str(write(tmp_path / "a")))))
        adapters.close()
    assert len(found) == 2


def test_the_link_is_part_of_the_format(adapters: Adapters, tmp_path: Path) -> None:
    """An adapter is a link without tokens before the first chunk, of kind LORA: it meets no salt and no token."""
    made = root(adapters, Lora("a", 1, str(write(tmp_path / "a"))))
    digest = adapters._known[1].digest
    assert digest is not None
    assert made == next_key(ROOT, b"", [Extra(Part.LORA, digest)])
    assert chain_keys(made, [1, 2], 1)[0] not in chain_keys(ROOT, [1, 2], 1)


def test_files_that_change_are_noticed(adapters: Adapters, tmp_path: Path) -> None:
    lora = Lora("a", 1, str(write(tmp_path / "a")))
    assert root(adapters, lora)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    before = weights.stat()
    weights.write_bytes(b"wEights")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert adapters.root(ROOT, lora) is None, "the same size and time, and another content"
    weights.write_bytes(b"weights")
    assert adapters.root(ROOT, lora) is None, "which of them vLLM has loaded nobody knows any more"


def test_files_that_go_are_noticed(adapters: Adapters, tmp_path: Path) -> None:
    lora = Lora("a", 1, str(write(tmp_path / "a")))
    assert root(adapters, lora)
    (tmp_path / "a" / "adapter_config.json").unlink()
    assert adapters.root(ROOT, lora) is None


@pytest.mark.parametrize("known", [False, True])
def test_a_number_that_comes_with_another_path(adapters: Adapters, tmp_path: Path, known: bool) -> None:
    """vLLM goes on with the weights that it has under the number, or loads others: nobody can tell."""
    one, other = (Lora("a", 1, str(write(tmp_path / name, name.encode()))) for name in ("a", "b"))
    assert adapters.root(ROOT, one) is None
    if known:
        assert adapters.wait(10.0)
    assert adapters.root(ROOT, other) is None
    assert adapters.wait(10.0)
    assert adapters.root(ROOT, one) is None and adapters.root(ROOT, other) is None


@pytest.mark.parametrize("first", [False, True])
def test_an_adapter_that_is_replaced_in_place(adapters: Adapters, tmp_path: Path, first: bool) -> None:
    lora = Lora("a", 1, str(write(tmp_path / "a")))
    if not first:
        assert root(adapters, lora)
    assert adapters.root(ROOT, lora._replace(load_inplace=True)) is None
    assert adapters.wait(10.0)
    assert adapters.root(ROOT, lora) is None


@pytest.mark.parametrize("what", ["nothing", "no weights", "no configuration", "a name that no hub knows"])
def test_what_is_no_adapter(adapters: Adapters, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a"
    if what in ("no weights", "no configuration"):
        write(path)
        (path / ("adapter_config.json" if what == "no configuration" else "adapter_model.safetensors")).unlink()
    elif what == "nothing":
        path.mkdir()
    caplog.set_level("WARNING", "tierkv")
    assert root(adapters, Lora("a", 1, str(path))) is None
    assert len(caplog.records) == 1 and "GPU alone" in caplog.text


def test_how_many_are_remembered_is_bounded(adapters: Adapters, tmp_path: Path) -> None:
    for number in range(1, MAX_ADAPTERS + 10):
        adapters.root(ROOT, Lora("a", number, str(tmp_path / "none")))
    assert len(adapters._known) == MAX_ADAPTERS


class HungFiles:
    """A file system that answers no ``stat`` until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.num_asked = 0
        monkeypatch.setattr("tierkv_connector.adapters.file_stamp", self)

    def __call__(self, path: Path) -> str:
        self.num_asked += 1
        self.asked.set()
        assert self.go_on.wait(60.0)
        return file_stamp(path)


def test_a_file_system_that_hangs_holds_nobody_up(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Were the step to wait for it, this test would not come back: nothing lets the file system go on but itself."""
    hung, well = (Lora(name, i, str(write(tmp_path / name, name.encode()))) for i, name in enumerate(("a", "b")))
    known = root(adapters, hung), root(adapters, well)
    caplog.set_level("WARNING", "tierkv")
    files = HungFiles(monkeypatch)
    assert adapters.root(ROOT, hung) is None
    assert files.asked.wait(60.0)
    for _ in range(50):
        assert adapters.root(ROOT, hung) is None
    assert files.num_asked == 1, "while it is stuck nobody asks again, or waits"
    assert len(caplog.records) == 1 and "does not say at once" in caplog.text
    monkeypatch.setattr("tierkv_connector.adapters.file_stamp", file_stamp)
    assert wait_until(lambda: adapters.root(ROOT, well)) == known[1], "another adapter's is on another thread"
    files.go_on.set()
    assert wait_until(lambda: adapters.root(ROOT, hung)) == known[0]


def test_files_that_change_while_their_file_system_hangs_are_noticed(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to an older question says nothing of what the files are now."""
    lora = Lora("a", 1, str(write(tmp_path / "a")))
    assert root(adapters, lora)
    real, begun, go_on = adapters_module._unchanged, threading.Event(), threading.Event()

    def late(adapter: object) -> bool:
        was: bool = real(adapter)  # type: ignore[arg-type]
        begun.set()
        assert go_on.wait(60.0)
        return was

    monkeypatch.setattr(adapters_module, "_unchanged", late)
    assert adapters.root(ROOT, lora) is None
    assert begun.wait(60.0)
    monkeypatch.setattr(adapters_module, "_unchanged", real)
    write(tmp_path / "a", b"other weights")
    go_on.set()
    wait_until(lambda: adapters._known[1].given_up or adapters.root(ROOT, lora))
    assert adapters._known[1].given_up and adapters.root(ROOT, lora) is None


def test_what_hangs_is_remembered_while_others_are_asked() -> None:
    checks, go_on, asked = FileChecks(wait_s=0.001), threading.Event(), []
    for _ in range(3):
        assert checks.ask("stuck", lambda: not asked.append(1) and go_on.wait(60.0)) is None
        assert wait_until(lambda: checks.ask("well", lambda: True))
    assert len(asked) == 1 and checks._num_threads == 2
    go_on.set()
    assert wait_until(lambda: checks.ask("stuck", lambda: True))
    checks.close()


def test_file_systems_that_all_hang_are_left_alone(tmp_path: Path) -> None:
    checks, go_on = FileChecks(wait_s=0.001), threading.Event()
    for name in range(MAX_THREADS):
        assert checks.ask(name, lambda: go_on.wait(60.0)) is None
    asked = []
    assert checks.ask("one more", lambda: not asked.append(1)) is None
    assert not asked and checks._num_threads <= MAX_THREADS
    go_on.set()
    assert wait_until(lambda: checks.ask("one more", lambda: True))
    assert checks.ask("fails", lambda: 1 // 0 == 0) in (False, None)
    checks.close()
