"""Real vLLM engines for tests, each in a process of its own that a test can question, stop and kill.

They are the environment's vLLM, or the version that ``TIERKV_VLLM`` names (:mod:`vllm_versions` provides it).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tierkv.client import AdminClient
from tierkv.config import socket_path
from tierkv.errors import TierKVError
from vllm_versions import engine_env

START_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 90.0
BLOCK_TOKENS = 32
CHUNK_TOKENS = 64
#: Tests of the shared tier do not wait for a second use.
THROUGH = {"shared": "through"}
VOCAB = 2048

#: One compute thread an engine: results do not depend on how many cores there are.
_NURSERY_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT") or str(Path.home() / ".cache" / "vllm"),
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
_SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK_TOKENS,
    "max_model_len": 2560,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 256,
    "disable_log_stats": True,
}


class EngineError(Exception):
    """A command failed in the engine's process; the message is that of the exception there."""


class EngineDiedError(Exception):
    """The engine's process has ended; the message holds the end of its log."""


class Answer(NamedTuple):
    """What a request gave.

    Attributes:
        tokens: the generated tokens.
        logprobs: their log probabilities, as hexadecimal floats: equal if and only if every bit is.
        others: per token, the log probabilities of the likeliest tokens.
        cached: tokens of the prompt that were not computed.
        reason: why it ended.
        told: its ``kv_transfer_params``.
    """

    tokens: list[int]
    logprobs: list[str]
    others: list[dict[str, str]]
    cached: int
    reason: str
    told: dict[str, Any] | None = None

    @property
    def bits(self) -> tuple[list[int], list[str], list[dict[str, str]]]:
        """All of the output that is to be equal bit for bit."""
        return self.tokens, self.logprobs, self.others

    def distance(self, other: Answer) -> float:
        """Return the largest difference of a token's log probability; infinite where a token differs."""
        if self.tokens != other.tokens:
            return float("inf")
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(float.fromhex(a) - float.fromhex(b)) for a, b in pairs)


class Engine:
    """One engine. It starts in the background: the first command waits for it.

    Args:
        model: the model's directory.
        directory: where its log and its caches go.
        connector: ``kv_connector_extra_config``; None for an engine without connector.
        transfer: further fields of vLLM's ``kv_transfer_config``.
        env: environment variables of the process; None removes one.
        hash_seed: PYTHONHASHSEED of its interpreter; None leaves it unset, so that Python draws one.
        settings: arguments of ``vllm.LLM``.
    """

    _numbers = itertools.count(1)

    def __init__(
        self,
        model: Path,
        directory: Path,
        connector: dict[str, Any] | None = None,
        *,
        transfer: dict[str, Any] | None = None,
        env: dict[str, str | None] | None = None,
        hash_seed: str | None = None,
        **settings: Any,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / f"engine{next(self._numbers)}.log"
        settings = {"model": str(model)} | _SETTINGS | settings
        if connector is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "TierKVConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": _plain({"chunk_tokens": CHUNK_TOKENS} | connector),
            } | (transfer or {})
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        env = {"XDG_CACHE_HOME": str(directory / "cache")} | (env or {})
        with self.log.open("wb") as log:
            self.pid = _Nursery.of(hash_seed).bear(env, (commands, answers, log.fileno()))
        os.close(commands)
        os.close(answers)
        self._pidfd = os.pidfd_open(self.pid)
        self._buffer = b""
        self._starting = True
        self._send("start", settings)

    # -- its process

    def ready(self) -> Engine:
        """Wait until it has started.

        Raises:
            EngineError: it did not; the message is vLLM's exception.
        """
        if self._starting:
            self._starting = False
            self._receive(START_TIMEOUT_S)
        return self

    def call(self, op: str, *, timeout_s: float = CALL_TIMEOUT_S, **args: Any) -> Any:
        """Execute a command of :class:`engine_driver.Driver`.

        Raises:
            EngineError: it raised there.
            EngineDiedError: the process has ended.
        """
        self.ready()
        self._send(op, args)
        return self._receive(timeout_s)

    def stop(self) -> None:
        """Shut the engine down and wait for its process. Idempotent."""
        self._close_commands()
        if not self._ended(30.0):
            self.kill()
            raise AssertionError(f"the engine did not leave:\n{self.tail()}")
        self._forget()

    def kill(self) -> None:
        """SIGKILL the engine's whole process group. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._close_commands()
        assert self._pidfd < 0 or self._ended(30.0)
        self._forget()

    def tail(self, nbytes: int = 6000) -> str:
        """Return the end of the engine's log."""
        return self.log.read_text(errors="replace")[-nbytes:]

    # -- commands with types

    def run(
        self,
        *prompts: Sequence[int],
        max_tokens: int = 8,
        salt: str | None = None,
        batch: bool = False,
        params: Any = None,
    ) -> list[Answer]:
        """Run prompts greedily, one at a time or together, with ``kv_transfer_params``."""
        answers = self.call("run", prompts=list(prompts), max_tokens=max_tokens, salt=salt, batch=batch, params=params)
        return [Answer(**answer) for answer in answers]

    def one(self, prompt: Sequence[int], max_tokens: int = 8, salt: str | None = None) -> Answer:
        """Run one prompt greedily."""
        return self.run(prompt, max_tokens=max_tokens, salt=salt)[0]

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 8, salt: str | None = None) -> None:
        """Add a request that :meth:`step` runs."""
        self.call("add", name=name, prompt=list(prompt), max_tokens=max_tokens, salt=salt)

    def step(self, num: int = 1) -> dict[str, Answer]:
        """Step and return what has finished."""
        return {name: Answer(**answer) for name, answer in self.call("step", num=num).items()}

    def finish(self, *names: str, timeout_s: float = 60.0) -> dict[str, Answer]:
        """Step until the requests ``names`` have finished, and return all that have by then."""
        deadline, finished = time.monotonic() + timeout_s, {}
        while not finished.keys() >= set(names):
            assert time.monotonic() < deadline, f"{set(names) - finished.keys()} did not finish in {timeout_s} s"
            finished |= self.step(4)
        return finished

    def step_until(self, condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        """Step, with the requests that are there, until ``condition()`` holds; none may finish meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the engine did not get there"
            finished = self.step()
            assert not finished, f"{list(finished)} finished too early"

    def abort_all(self) -> None:
        """Abort every request and wait until the engine is at rest."""
        self.call("abort", names=list(self.call("states")))
        self.call("idle")

    def counters(self) -> dict[str, int]:
        """Return the connector's counters, once every STORE has been answered."""
        counters: dict[str, int] = self.call("settle")
        return counters

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Yield a dictionary that holds, after the block, by how much each counter has risen in it."""
        before, risen = self.counters(), {}
        yield risen
        after = self.counters()
        names = {"host_hits", "disk_hits", "shared_hits", "missed", "spilled", "stored", *after}
        risen.update({name: after.get(name, 0) - before.get(name, 0) for name in names})

    def reset_gpu(self) -> None:
        """Empty vLLM's own prefix cache and nothing else."""
        assert self.call("reset_gpu"), "vLLM's prefix cache is in use"

    def clear_host(self) -> None:
        """Empty GPU and host pool: what is hit now comes from the store server."""
        self.reset_gpu()
        self.call("clear_host")

    # --

    def _send(self, op: str, args: dict[str, Any]) -> None:
        data = json.dumps(_plain({"op": op} | args)).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._commands, data) :]
        except BrokenPipeError:
            raise EngineDiedError(f"the engine's process has ended:\n{self.tail()}") from None

    def _receive(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                self.kill()
                raise AssertionError(f"no answer within {timeout_s} s:\n{self.tail()}")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise EngineDiedError(f"the engine's process has ended:\n{self.tail()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            error = EngineError(answer["error"])
            error.add_note(answer["traceback"])
            raise error
        return answer["result"]

    def _ended(self, timeout_s: float) -> bool:
        return self._pidfd < 0 or bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def _close_commands(self) -> None:
        if self._commands >= 0:
            os.close(self._commands)
            self._commands = -1

    def _forget(self) -> None:
        for fd in (self._pidfd, self._answers):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._answers = -1


class _Nursery:
    """The process that engines are forked from: one a hash seed, for as long as the tests run."""

    _known: ClassVar[dict[str | None, _Nursery]] = {}

    def __init__(self, hash_seed: str | None) -> None:
        env = os.environ | _NURSERY_ENV | engine_env()
        env.pop("PYTHONHASHSEED", None)
        if hash_seed is not None:
            env["PYTHONHASHSEED"] = hash_seed
        driver = Path(__file__).with_name("engine_driver.py")
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, str(driver), str(theirs.fileno())],
            env=env,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,
        )
        theirs.close()

    @classmethod
    def of(cls, hash_seed: str | None) -> _Nursery:
        """Return the nursery of a hash seed, started if need be."""
        if hash_seed not in cls._known:
            cls._known[hash_seed] = cls(hash_seed)
            atexit.register(cls._known[hash_seed].close)
        return cls._known[hash_seed]

    def bear(self, env: dict[str, str | None], fds: Sequence[int]) -> int:
        """Fork a process with three descriptors (commands, answers, log) and return its id."""
        try:
            socket.send_fds(self._link, [json.dumps(env).encode()], fds)
            pid = self._link.recv(64)
        except OSError:
            pid = b""
        if not pid:
            raise EngineDiedError("the process that imports vLLM has ended; its reason is on standard error")
        return int(pid)

    def close(self) -> None:
        """End the process; engines that are left end with the tests' end of their pipes."""
        self._link.close()
        self._process.wait()


class Lab:
    """Engines and store servers of a test, ended with it.

    Args:
        directory: where everything goes.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._engines: list[Engine] = []
        self._disks: set[Path] = set()

    def disk(self, name: str = "disk") -> Path:
        """Return a directory for a disk tier, whose store server ends with the test."""
        path = self.directory / name
        self._disks.add(path)
        return path

    def engine(self, model: Path, connector: dict[str, Any] | None = None, **options: Any) -> Engine:
        """Return a new engine; see :class:`Engine`. Tiers are small unless ``connector`` says otherwise.

        Nor does a deadline end a wait that a busy machine makes long, or a fetch lose to a model that computes a chunk
        in a millisecond, and every load is one that its request waits for: tests that are about it set their own.
        """
        if connector is not None:
            small = {"host_bytes": "64MiB", "deadline_s": 30.0, "cost_gate": False, "sync_load_bytes": 0} | (
                {"disk_bytes": "256MiB"} if "disk_dir" in connector else {}
            )
            connector = small | connector
        engine = Engine(model, self.directory, connector, **options)
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        """Kill what is left."""
        for engine in self._engines:
            engine.kill()
        for disk in self._disks:
            shut_down(disk)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Prompts:
    """Random prompts, the same in every run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def new(self, num_tokens: int) -> list[int]:
        """Return a prompt that shares nothing with any before."""
        return [self._random.randrange(VOCAB) for _ in range(num_tokens)]


def server_pid(disk_dir: Path) -> int:
    """Return the process id of the store server that owns ``disk_dir``."""
    return int((disk_dir / "lock").read_text())


def admin(disk_dir: Path) -> AdminClient:
    """Return a client of the store server that owns ``disk_dir``."""
    return AdminClient(socket_path(disk_dir))


def drain(disk_dir: Path) -> None:
    """Wait until the store server has written everything it has taken."""
    with admin(disk_dir) as client:
        assert client.call("TKV.DRAIN") == b"1"


def shut_down(disk_dir: Path) -> None:
    """Make the store server of ``disk_dir``, if there is one, leave, and wait until it has."""
    with contextlib.suppress(TierKVError, OSError):
        pidfd = os.pidfd_open(server_pid(disk_dir))
        with admin(disk_dir) as client:
            client.call("SHUTDOWN")
        select.select([pidfd], [], [], 15.0)
        os.close(pidfd)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
