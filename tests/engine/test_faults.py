"""Processes that are killed: the store server and Redis while requests need them, an engine with all it started."""

from __future__ import annotations

import os
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine_process import CHUNK_TOKENS, THROUGH, Answer, Engine, Lab, Prompts, admin, drain, server_pid
from leaks import holders, pool_files, processes, shm_names
from records import wait_until
from servers import RedisServer
from tierkv.client import AdminClient
from tierkv.config import LINGER_S, socket_path
from tierkv.messages import Select
from tierkv.rendezvous import address

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=4)

Cold = Callable[..., Answer]


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk()


@pytest.fixture(scope="module")
def shared_engine(module_lab: Lab, model: Path, disk: Path, redis_server: RedisServer) -> Engine:
    return module_lab.engine(
        model, {"disk_dir": disk, "shared_url": redis_server.url, "spill": THROUGH, "deadline_s": 2.0}
    )


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The engine with a store server; after the test nothing may be held by a request."""
    wait_until(lambda: shared_engine.call("connected"), 40.0)
    yield shared_engine
    wait_until(lambda: not any(shared_engine.call("leases").values()))


@pytest.fixture(scope="module")
def prompts(shared_engine: Engine, disk: Path) -> list[list[int]]:
    """Prompts of four chunks and some tokens, stored everywhere."""
    prompts = [PROMPTS.new(300) for _ in range(6)]
    shared_engine.run(*prompts, max_tokens=1, batch=True)
    shared_engine.counters()
    drain(disk)
    return prompts


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], cold: Cold) -> list[Answer]:
    return [cold(prompt) for prompt in prompts]


def run_while(engine: Engine, prompts: Sequence[list[int]], num_steps: int, fault: Callable[[], None]) -> list[Answer]:
    """Run prompts together and let ``fault`` happen after some steps; return their answers."""
    names = [f"loaded-{secrets.token_hex(4)}" for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(name, prompt)
    finished = engine.step(num_steps) if num_steps else {}
    fault()
    finished |= engine.finish(*(set(names) - finished.keys()))
    return [finished[name] for name in names]


def check(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.distance(wanted) < 1e-4
        assert answer.reason == "length"


def evict_disk(disk: Path) -> None:
    with admin(disk) as client:
        client.ask("TKV.EVICT", Select(tiers=["disk"], everything=True))


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_killing_the_store_server_under_load(
    engine: Engine,
    disk: Path,
    prompts: list[list[int]],
    expected: list[Answer],
    cold: Cold,
    num_steps: int,
) -> None:
    more = [PROMPTS.new(200) for _ in range(3)]
    engine.clear_host()
    pid = server_pid(disk)
    answers = run_while(engine, prompts + more, num_steps, lambda: os.kill(pid, signal.SIGKILL))
    check(answers, expected + [cold(prompt) for prompt in more])

    wait_until(lambda: engine.call("connected"), 40.0)
    assert server_pid(disk) != pid
    engine.clear_host()
    with engine.counting() as counters:
        check(engine.run(*prompts), expected)
    assert counters["disk_hits"] == 4 * len(prompts)
    assert counters["missed"] == 0


@pytest.mark.parametrize("num_steps", [0, 2])
def test_killing_redis_under_load(
    engine: Engine,
    disk: Path,
    redis_server: RedisServer,
    prompts: list[list[int]],
    expected: list[Answer],
    cold: Cold,
    num_steps: int,
) -> None:
    more = [PROMPTS.new(200) for _ in range(3)]
    evict_disk(disk)
    engine.clear_host()
    check(run_while(engine, prompts + more, num_steps, redis_server.kill), expected + [cold(p) for p in more])
    more = [PROMPTS.new(200) for _ in range(3)]
    check(engine.run(*more, batch=True), [cold(prompt) for prompt in more])

    redis_server.start()
    with redis_server.client() as client:

        def stores_again() -> bool:
            engine.one(PROMPTS.new(CHUNK_TOKENS), max_tokens=1)
            engine.counters()
            drain(disk)
            return client.dbsize() > 0

        wait_until(stores_again, 40.0)
    engine.clear_host()
    evict_disk(disk)
    engine.run(*prompts, max_tokens=1)
    engine.counters()
    drain(disk)
    engine.clear_host()
    evict_disk(disk)
    with engine.counting() as counters:
        check(engine.run(*prompts), expected)
    assert counters["shared_hits"] == 4 * len(prompts)
    assert counters["disk_hits"] == counters["missed"] == 0


def test_a_redis_that_answers_nothing(
    engine: Engine, disk: Path, redis_server: RedisServer, prompts: list[list[int]], expected: list[Answer]
) -> None:
    """It is out after the deadline, and hit again when it answers."""
    evict_disk(disk)
    engine.clear_host()
    redis_server.sigstop()
    try:
        with engine.counting() as counters:
            check(engine.run(*prompts, batch=True), expected)
        assert counters["shared_hits"] == 0
        assert counters["missed"] == 4 * len(prompts)
    finally:
        redis_server.sigcont()

    def hits() -> bool:
        engine.clear_host()
        evict_disk(disk)
        with engine.counting() as counters:
            check(engine.run(*prompts), expected)
        return counters["shared_hits"] == 4 * len(prompts)

    wait_until(hits, 60.0)


def shm_of(pids: set[int]) -> set[Path]:
    """Return the files in /dev/shm that processes have open or mapped."""
    found = set()
    for pid in pids:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        lines += [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
        found |= {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line}
    return found


def kinds_left(files: set[Path]) -> Counter[str]:
    """Return the files that are still there, by the start of their names."""
    return Counter(path.name[:4] for path in files if path.exists())


def num_on_disk(client: AdminClient) -> int:
    """Return how many chunks the disk tier has."""
    return next(int(tier["num_entries"]) for tier in client.ask("TKV.STAT")["tiers"] if tier["name"] == "disk")


def test_killing_an_engine_leaves_nothing_and_its_successor_hits(lab: Lab, model: Path, cold: Cold) -> None:
    mark, disk = f"TIERKV_TEST_{secrets.token_hex(8)}", lab.disk()
    env: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    prompts = [PROMPTS.new(300) for _ in range(3)]
    names = shm_names()

    plain = lab.engine(model, env=env)  # vLLM leaves things of its own
    engine = lab.engine(model, {"disk_dir": disk}, transfer={"engine_id": mark}, env=env | {mark: "1"})
    plain.run(*prompts, max_tokens=1)
    engine.run(*prompts, max_tokens=1)
    with admin(disk) as client:
        wait_until(lambda: num_on_disk(client) == 12)
        assert len(client.ask("TKV.STAT")["engines"]) == 1
    started = processes(engine.pid, mark)
    assert len(started) >= 3, "the engine's two processes and its store server"
    assert server_pid(disk) in started
    segments = set().union(*(pool_files(pid) for pid in started))
    assert holders(segments) >= {server_pid(disk)}
    assert socket_path(disk).is_socket()
    assert address(mark)[1:] in Path("/proc/net/unix").read_text()
    with_connector, without = shm_of(started), shm_of(processes(plain.pid))

    plain.kill()
    engine.kill()
    # A process's threads end one by one: it is gone a little later than its first thread.
    wait_until(lambda: address(mark)[1:] not in Path("/proc/net/unix").read_text())
    assert processes(engine.pid, mark) == {server_pid(disk)}, "the store server lingers, nothing else"
    wait_until(lambda: not processes(engine.pid, mark), LINGER_S + 10)
    assert not socket_path(disk).exists()
    assert not holders(segments)
    assert kinds_left(with_connector) == kinds_left(without)
    assert shm_names() <= names
    for path in with_connector | without:  # what vLLM leaves
        path.unlink(missing_ok=True)

    successor = lab.engine(model, {"disk_dir": disk})
    with successor.counting() as counters:
        check(successor.run(*prompts), [cold(prompt) for prompt in prompts])
    assert counters["disk_hits"] == 12
    assert counters["missed"] == 0
