"""What happens to processes: an engine dies in a copy or while it makes its pool, a worker dies, the clock jumps,
descriptors run out, memory is short: ten kinds.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engine_process import Answer, Engine, EngineDiedError, EngineError
from fake_engine import wait_until
from fire.in_engine import POOL
from fire.kind import Kind, register
from fire.references import TOLERANCE
from fire.stage import Stage
from leaks import left_in_shm, pool_files, shm_names
from tierkv.rendezvous import address

#: What the disk tier's directory holds; nothing else may be left there.
_FILES = {"lock", "ns", "server.log", "server.log.1", "control.json", "control.journal"}
_GONE_S = 20.0
#: Connections that a server is asked to let in, to see whether it can.
_MANY = 40


class Witness:
    """The engine that survives: what it hits, and answers, before and after another one has died."""

    def __init__(self, stage: Stage, rng: random.Random) -> None:
        self._engine = stage.engines["inline"]
        self._prompt = [rng.randrange(2048) for _ in range(200)]
        self._before = self._hit()

    def check(self) -> None:
        """Check that it hits as before, with the same answer."""
        after = self._hit()
        assert after.distance(self._before) <= TOLERANCE, "the engine that survived answers otherwise"

    def _hit(self) -> Answer:
        engine = self._engine
        engine.one(self._prompt, max_tokens=4)
        engine.counters()
        engine.clear_host()
        with engine.counting() as counters:
            answer = engine.one(self._prompt, max_tokens=4)
        assert counters["disk_hits"] + counters["shared_hits"] > 0, f"the engine that survived hits nothing: {counters}"
        return answer


def check_nothing_is_left(stage: Stage, engine: str, segments: set[str], shm: set[str]) -> None:
    """Check that of an engine's process that has died nothing is left: in its server, as memory, as a file."""

    def left() -> list[str]:
        found = []
        if segments & pool_files(stage.store.pid):
            found.append("pool memory in the store server")
        if engine in {row["engine_id"] for row in stage.store.ask("TKV.STAT")["engines"]}:
            found.append("a session in the store server")
        if address(engine)[1:] in Path("/proc/net/unix").read_text():
            found.append("a pool socket")
        found += sorted(left_in_shm(shm))
        return found

    wait_until(lambda: not left(), _GONE_S, f"the engine that died left behind: {', '.join(left())}")
    strange = {path.name for path in stage.disk.iterdir()} - _FILES
    assert not strange, f"in the disk tier's directory lies {sorted(strange)}"


class EngineDies(Kind):
    """The local engine is killed in the middle of a copy between GPU and slot.

    Args:
        point: of :mod:`fire.in_engine`.
        what: in words.
    """

    group = "engine"
    moments = (0, 0)
    kills_engine = True

    def __init__(self, point: str, what: str) -> None:
        self.name = f"engine dies in {what}"
        self._point = point

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self._witness = Witness(stage, rng)
        self._engine = stage.engines["local"]
        self._engine_id = self._engine.call("stat")["engine_id"]
        self._segments, self._shm = pool_files(self._engine.pid), shm_names(of_vllm=True)
        self._engine.call("die_at", point=self._point, number=rng.randint(1, 4))

    def struck(self, stage: Stage) -> int:
        return int(has_died(self._engine))

    def end(self, stage: Stage) -> None:
        died = has_died(self._engine)
        if died:
            check_nothing_is_left(stage, self._engine_id, self._segments, self._shm)
            self._witness.check()
        stage.restart_engine("local")  # one that did not die has an order yet


class EngineDiesAtStart(EngineDies):
    """The next engine is killed while it makes its pool, offers it, or gives it to the server."""

    def __init__(self) -> None:
        super().__init__("pool", "making its pool")

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self._witness = Witness(stage, rng)
        os.killpg(stage.engines["local"].pid, signal.SIGKILL)
        self._shm = shm_names(of_vllm=True)
        env: dict[str, str | None] = {"TIERKV_TEST_DIE_AT": rng.choice(POOL)}
        self._engine_id = new_engine_id(rng)
        self._engine = stage.start_engine("local", env=env, transfer={"engine_id": self._engine_id})
        self._segments = set()
        with contextlib.suppress(EngineDiedError, EngineError):
            self._engine.ready()


class WorkerDies(Kind):
    """Of an engine of several processes the worker is killed while it serves; others of the same server go on."""

    name, group = "a worker dies", "engine"
    moments = (0, 0)

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self._witness = Witness(stage, rng)
        self._num_struck, self._shm = 0, shm_names(of_vllm=True)
        before = stage.engines["local"]
        env: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self._engine_id = new_engine_id(rng)
        transfer = {"engine_id": self._engine_id}
        self._engine = stage.start_engine("local", env=env, transfer=transfer, distributed_executor_backend="mp")
        stage.engines["local"] = before
        self._serve(rng)

    def _serve(self, rng: random.Random) -> None:
        prompts = [[rng.randrange(2048) for _ in range(500)] for _ in range(6)]
        self._engine.ready()
        self._engine.run(prompts[0], max_tokens=1)
        workers = processes_named(self._engine.pid, "Worker")
        assert workers, "this engine has no worker process of its own"
        self._segments = set().union(*(pool_files(pid) for pid in workers))
        ended: list[str] = []

        def serve() -> None:
            try:
                self._engine.run(*prompts, max_tokens=64, batch=True)
            except (EngineError, EngineDiedError) as error:
                ended.append(str(error))

        thread = threading.Thread(target=serve)
        thread.start()
        time.sleep(rng.uniform(0.05, 0.4))
        os.kill(rng.choice(workers), signal.SIGKILL)
        thread.join(60)
        assert not thread.is_alive(), "an engine whose worker has died does not say so"
        self._num_struck = len(ended)

    def struck(self, stage: Stage) -> int:
        return self._num_struck

    def end(self, stage: Stage) -> None:
        self._engine.kill()
        for path in Path("/dev/shm").iterdir():
            if path.name not in self._shm and not is_mapped(path):
                path.unlink(missing_ok=True)  # vLLM's own, of processes that were killed
        check_nothing_is_left(stage, self._engine_id, self._segments, self._shm)
        self._witness.check()


class ClockJumps(Kind):
    """The server's wall clock jumps, and jumps back at the end; engines and Redis keep theirs.

    Args:
        name: the kind's.
        jumps_s: seconds, one of them.
    """

    group = "clock"
    moments = (0, 3)

    def __init__(self, name: str, jumps_s: tuple[float, ...]) -> None:
        self.name = name
        self._jumps_s = jumps_s

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self._jump_s = rng.choice(self._jumps_s)
        stage.store.arm("clock", "jump", arg=self._jump_s)

    def end(self, stage: Stage) -> None:
        stage.store.disarm()

    def struck(self, stage: Stage) -> int:
        """Return how many events the server has noted at the time that it was made to see."""
        events = stage.store.ask("TKV.EVENTS")["events"]
        off_s = [event["when"] - time.time() for event in events]
        return sum(abs(s - self._jump_s) < abs(self._jump_s) / 2 for s in off_s)


class NoDescriptors(Kind):
    """A process may open no descriptor more.

    Args:
        who: ``"server"`` or ``"engine"``.
    """

    group = "limits"
    moments = (0, 3)

    def __init__(self, who: str) -> None:
        self.name = f"the {who} has no descriptors left"
        self._who = who

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self._pid = stage.store.pid if self._who == "server" else stage.engines["local"].pid
        self._before = resource.prlimit(self._pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self._pid, resource.RLIMIT_NOFILE, (num_fds(self._pid), self._before[1]))
        self._held: list[socket.socket] = []
        if self._who == "server":  # a thread that waits in accept() has its next descriptor already
            while len(self._held) < 8 and (link := let_in(stage)) is not None:
                self._held.append(link)
        with stage.redis.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)  # it has to connect again
        if self._who == "engine":
            stage.store.restart()  # likewise

    def end(self, stage: Stage) -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self._pid, resource.RLIMIT_NOFILE, self._before)
        while self._held:
            self._held.pop().close()

    def struck(self, stage: Stage) -> int:
        if self._who == "engine":
            return int(not stage.engines["local"].call("connected"))
        return int(len(self._held) < 8)


class LittleMemory(Kind):
    """The server gets little more memory than it has: by a cgroup where one may be made, else by its address space."""

    name, group = "the server's memory is limited", "limits"
    moments = (0, 3)
    _NBYTES = 256 << 10

    def __init__(self) -> None:
        self._group: Path | None = None
        self._held: list[socket.socket] = []
        self._told = False

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self._group = make_memory_group(f"tierkv-fire-{os.getpid()}")
        if not self._told:
            self._told = True
            how = f"the cgroup {self._group}" if self._group else "RLIMIT_AS, as no memory cgroup may be made here"
            print(f"{self.name}: by {how}", file=sys.stderr, flush=True)
        if self._group:
            self._restart_in(stage, self._group)
            used, limit = ("current", "max") if v2(self._group) else ("usage_in_bytes", "limit_in_bytes")
            self._limit = self._group / f"memory.{limit}"
            self._limit.write_text(str(int((self._group / f"memory.{used}").read_text()) + self._NBYTES))
            return
        self._pid = stage.store.pid
        self._before = resource.prlimit(self._pid, resource.RLIMIT_AS)
        resource.prlimit(self._pid, resource.RLIMIT_AS, (address_nbytes(self._pid) + self._NBYTES, self._before[1]))
        while len(self._held) < _MANY and (link := let_in(stage)) is not None:  # each takes a thread, with its stack
            self._held.append(link)

    def _restart_in(self, stage: Stage, group: Path) -> None:
        """Start the server anew as a member of a group: what a process had before it came counts nowhere."""
        (group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            stage.store.restart()
        finally:
            (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        self._pid = stage.store.pid
        for engine in stage.engines.values():
            wait_until(lambda engine=engine: engine.call("connected"), stage.RECONNECT_S)

    def struck(self, stage: Stage) -> int:
        """Return how often the limit was hit: as the kernel counts it, or a thread that could not be made."""
        if self._group is None:
            return int(len(self._held) < _MANY)
        if v2(self._group):
            rows = dict(line.split() for line in (self._group / "memory.events").read_text().splitlines())
            return int(rows["max"])
        return int((self._group / "memory.failcnt").read_text())

    def end(self, stage: Stage) -> None:
        if self._group:
            self._limit.write_text("max" if v2(self._group) else "-1")
            with contextlib.suppress(ProcessLookupError, OSError):
                (self._group.parent / "cgroup.procs").write_text(str(self._pid))
        else:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self._pid, resource.RLIMIT_AS, self._before)
            while self._held:
                self._held.pop().close()
        stage.store.revive()  # the kernel may have ended it
        if self._group:
            group, self._group = self._group, None
            wait_until(lambda: not (group / "cgroup.procs").read_text(), _GONE_S, "a cgroup is not empty")
            group.rmdir()


def new_engine_id(rng: random.Random) -> str:
    """Return a name for an engine."""
    return f"fire-{os.getpid()}-{rng.randrange(1 << 60):x}"


def has_died(engine: Engine) -> bool:
    """Return whether an engine's process has ended, or will in a moment."""
    return engine._pidfd < 0 or engine._ended(0.5)


def processes_named(group: int, name: str) -> list[int]:
    """Return the processes of a group whose command line has ``name`` in it."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (directory / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group and name in (directory / "cmdline").read_text():
                found.append(int(directory.name))
    return found


def is_mapped(path: Path) -> bool:
    """Return whether a process has a file of /dev/shm mapped or open."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(path) in (directory / "maps").read_text():
                return True
    return False


def num_fds(pid: int) -> int:
    """Return the number of the first descriptors that are all in use: as a limit it lets no new one in."""
    used = {int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(used) + 1) if number not in used)


def let_in(stage: Stage) -> socket.socket | None:
    """Return a new connection on which the server answers within half a second; None where it does not."""
    link = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        link.settimeout(0.5)
        link.connect(str(stage.config.socket))
        link.sendall(b"*1\r\n$4\r\nPING\r\n")
        if link.recv(16).startswith(b"+PONG"):
            return link
    link.close()
    return None


def address_nbytes(pid: int) -> int:
    """Return the size of a process's address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def v2(group: Path) -> bool:
    """Return whether a cgroup is one of version 2."""
    return (group / "cgroup.controllers").exists()


def make_memory_group(name: str) -> Path | None:
    """Make a cgroup that limits memory, below this process's own; None where that may not be."""
    places: list[Path] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            places.append(Path(f"/sys/fs/cgroup/memory{path}"))
        elif not controllers:
            places.append(Path(f"/sys/fs/cgroup{path}"))
    for place in places:
        group = place / name
        with contextlib.suppress(OSError):
            group.mkdir()
            if any((group / file).exists() for file in ("memory.max", "memory.limit_in_bytes")):
                return group
            group.rmdir()
    return None


_kinds: list[Any] = [
    EngineDies("store", "a copy from the GPU to a slot"),
    EngineDies("load", "a copy from a slot to the GPU"),
    EngineDiesAtStart(),
    WorkerDies(),
    ClockJumps("the clock jumps forward", (90.0, 3600.0, 40 * 86400.0)),
    ClockJumps("the clock jumps back", (-90.0, -3600.0, -400 * 86400.0)),
    NoDescriptors("server"),
    NoDescriptors("engine"),
    LittleMemory(),
]
for _kind in _kinds:
    register(_kind)
