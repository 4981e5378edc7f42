"""The command line against a real store server that a fake engine has filled."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli_tools import on_terminal
from fake_engine import FakeEngine, make_namespace, wait_until
from servers import server_binaries, start_redis
from tierkv import __version__
from tierkv.cli import VERBS
from tierkv.client import AdminClient
from tierkv.errors import UnavailableError

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_COLOUR = re.compile(r"\x1b\[(?:\d+;)*[39][0-7]m")
CHUNK = 32
#: Three chains: A and B share their first four chunks, C stands alone.
SYSTEM = list(range(4 * CHUNK))
A = [*SYSTEM, *range(1000, 1000 + 3 * CHUNK)]
B = [*SYSTEM, *range(2000, 2000 + 2 * CHUNK)]
C = list(range(5000, 5000 + 5 * CHUNK))


def run(*args: str | Path, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``tierkv`` and return what it said."""
    command = [sys.executable, "-m", "tierkv.cli", *map(str, args)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TIERKV_")} | (env or {})
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, env=environment)


class Served:
    """A server started by ``tierkv serve``."""

    def __init__(self, directory: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.socket = directory / "tierkv.sock"
        command = [sys.executable, "-m", "tierkv.cli", "serve", "--disk-dir", str(directory), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | (env or {}))
        wait_until(self._answers, what="the server did not start")

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"the server left: {self.process.stderr and self.process.stderr.read()}"
        with contextlib.suppress(UnavailableError), AdminClient(self.socket) as client:
            return client.call("PING") == b"PONG"
        return False

    def stop(self) -> tuple[int, str]:
        """Stop it as a service manager does, and return its exit code and log."""
        self.process.send_signal(signal.SIGTERM)
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, log

    def tierkv(self, verb: str, *args: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a verb against this server."""
        return run(verb, "--server", self.socket, *args, stdin=stdin)

    def json(self, verb: str, *args: str | Path, code: int = 0, stdin: str = "") -> Any:
        """Run a verb with ``--json``, check its exit code and return the object."""
        done = self.tierkv(verb, "--json", *args, stdin=stdin)
        assert done.returncode == code, done.stderr
        assert done.stdout.count("\n") == 1
        return json.loads(done.stdout)

    def ids(self) -> list[str]:
        """Return the ids of the stored prefixes."""
        done = self.tierkv("ls", "--json")
        return [row["id"] for row in json.loads(done.stdout)["prefixes"]]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path / "store", "--disk-bytes", "64MiB")
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.fixture
def engine(served: Served) -> Iterator[FakeEngine]:
    with FakeEngine(served.socket) as engine:
        yield engine


@pytest.fixture
def filled(served: Served, engine: FakeEngine) -> FakeEngine:
    """An engine with A, B and C in its host pool and on the disk."""
    for seed, tokens in enumerate((A, B, C)):
        engine.put(tokens, seed=seed)
    return engine


def short_id(engine: FakeEngine, tokens: Sequence[int], salt: str = "") -> str:
    """Return the id of the prefix that ends with the prompt's last whole chunk."""
    return engine.keys(tokens, salt)[-1].hex()[:12]


def text(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def sentence(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Check the exit code and that standard error is one line with these words, and no traceback."""
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("tierkv: ") and done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


# -- start-up


def test_help_is_fast() -> None:
    def once() -> float:
        started = time.perf_counter()
        assert run("--help").returncode == 0
        return time.perf_counter() - started

    assert min(once() for _ in range(5)) < 0.4


def test_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "tierkv.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "click" in imported
    assert not imported & {"redis", "lmdb", "numpy", "rich", "msgspec", "xxhash", "asyncio", "torch", "tierkv_server"}


def test_help_lists_every_verb() -> None:
    done = run("--help")
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout


def test_version() -> None:
    assert run("--version").stdout == f"tierkv {__version__}\n"


# -- bad usage and unreachable servers


@pytest.mark.parametrize(
    "args, words",
    [
        (["lst"], ["no such command", "tierkv --help"]),
        (["ls", "--nope"], ["--nope", "tierkv ls --help"]),
        (["ls", "--limit", "0"], ["--limit", "0"]),
        (["ls", "--tier", "gpu"], ["gpu", "disk"]),
        (["ls", "--prefix", "xyz"], ["xyz", "hexadecimal"]),
        (["ls", "--namespace", ""], ["namespace", "hexadecimal"]),
        (["ls", "--server", "tcp://host:1"], ["tcp://host:1", "unix://"]),
        (["match"], ["no prompt", "--tokens"]),
        (["match", "--tokens", "1 two 3"], ["'two'", "whole numbers"]),
        (["match", "--tokens", "1 -2"], ["'-2'"]),
        (["match", "--tokens", str(1 << 32)], [str(1 << 32)]),
        (["match", "--tokens", "[1, 2"], ["JSON"]),
        (["match", "--tokens", "[1, 2.5]"], ["2.5"]),
        (["match", "--tokens", ""], ["no token ids"]),
        (["match", "--tokens-file", "not-there"], ["tokens_file='not-there'", "No such file"]),
        (["match", "--tokens", "1", "--tokens-file", "-"], ["--tokens-file", "one of them"]),
        (["match", "--tokens", "1", "--salt", "a", "--salt-file", "b"], ["--salt-file"]),
        (["evict"], ["nothing is named"]),
        (["evict", "--salt", "a", "12ab"], ["salt", "without a prompt"]),
        (["evict", "12ab", "--tokens", "1"], ["give one of them"]),
        (["serve", "--disk-bytes", "12 parsecs"], ["disk_bytes='12 parsecs'", "8GiB"]),
        (["serve", "--disk-bytes", "0"], ["disk_bytes='0'", "no room"]),
        (["serve", "--shared-url", "http://host"], ["shared_url='http://host'", "redis://"]),
        (["serve", "--shared-url", "me:secret@host"], ["shared_url='me:***@host'"]),
        (["serve", "--disk-dir", "/dev/null/x"], ["$.disk.dir: '/dev/null/x'"]),
    ],
)
def test_bad_usage(args: list[str], words: list[str], tmp_path: Path) -> None:
    env = {"TIERKV_SERVER": str(tmp_path / "no.sock"), "XDG_CACHE_HOME": str(tmp_path)}
    sentence(run(*args, env=env), 2, *words)


@pytest.mark.parametrize("verb", ["stat", "ls", "match", "evict"])
def test_no_server(verb: str, tmp_path: Path) -> None:
    more = {"match": ["--tokens", "1"], "evict": ["12ab"]}.get(verb, [])
    done = run(verb, *more, "--server", f"unix://{tmp_path}/none.sock")
    sentence(done, 3, f"{tmp_path}/none.sock", "tierkv serve")
    assert not done.stdout


def test_the_server_comes_from_the_environment(served: Served) -> None:
    assert run("stat", env={"TIERKV_SERVER": f"unix://{served.socket}"}).returncode == 0


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = run("ls", "--server", tmp_path / "none.sock", env={"TIERKV_DEBUG": "1"})
    assert "Traceback" in done.stderr and done.returncode == 3


# -- serve


def test_serve_says_its_configuration_and_leaves_on_sigterm(served: Served) -> None:
    code, log = served.stop()
    assert code == 0
    first, *rest = log.splitlines()
    assert f"disk 64 MiB in {served.directory}, no shared tier" in first
    assert [line.partition("INFO ")[2] for line in rest] == ["SIGTERM: leaving", "stopped"]
    assert not served.socket.exists()


def test_serve_refuses_a_directory_in_use(served: Served) -> None:
    sentence(run("serve", "--disk-dir", served.directory), 4, str(served.directory), str(served.process.pid))
    assert served.tierkv("stat").returncode == 0


def test_serve_refuses_a_socket_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    sentence(run("serve", "--disk-dir", tmp_path / "store", "--socket", tmp_path / "file"), 2, "file", "no socket")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])  # SIGHUP reloads: test_operation.py
def test_a_signal_makes_the_server_leave_cleanly(served: Served, number: signal.Signals) -> None:
    assert served.socket.is_socket()
    served.process.send_signal(number)
    served.process.communicate(timeout=30)
    assert served.process.returncode == 0
    assert not served.socket.exists()


# -- an empty store


def test_empty_store(served: Served) -> None:
    stat = served.tierkv("stat")
    assert stat.returncode == 0 and str(served.socket) in stat.stdout
    sentence(served.tierkv("ls"), 1, "nothing is stored")
    assert served.json("ls", code=1) == {"prefixes": [], "total": 0}
    sentence(served.tierkv("match", "--tokens", "1 2 3"), 1, "nothing is stored here")
    assert served.json("match", "--tokens", "1 2 3", code=1) == {"tokens": 3, "namespaces": []}
    sentence(served.tierkv("evict", "12ab"), 1, "12ab")
    assert served.json("evict", "12ab", code=1)["num_removed"] == 0
    sentence(served.tierkv("evict", "--tokens", "1 2 3"), 1, "nothing is stored here")
    sentence(served.tierkv("evict", "--namespace", "ab", "--yes"), 1, "'ab'")
    for words in (("--tokens", "1 2 3"), ("--namespace", "ab", "--yes")):
        assert served.json("evict", *words, code=1)["num_removed"] == 0


def test_a_tier_that_is_out_may_hold_what_was_to_be_evicted(tmp_path: Path) -> None:
    """Nothing is known to be stored, but one tier could not be asked: that is not "nothing"."""
    served = Served(tmp_path / "one", "--shared-url", f"unix://{tmp_path}/nobody.sock")
    for words in (("--tokens", "1 2 3"), ("--namespace", "ab", "--yes"), ("12ab",)):
        sentence(served.tierkv("evict", *words), 4, "the shared tier is out")
        assert served.json("evict", *words, code=4)["incomplete"]
    assert served.stop()[0] == 0


# -- stat, ls


def test_stat(served: Served, filled: FakeEngine) -> None:
    stat = served.json("stat")
    assert stat["server"]["num_engines"] == 1 and stat["server"]["disk_dir"] == str(served.directory)
    tiers = {tier["name"]: tier for tier in stat["tiers"]}
    assert tiers["disk"]["num_entries"] == tiers["host"]["num_entries"] == tiers["disk"]["num_stored"] == 14
    assert tiers["host"]["budget"] == filled.shape.nbytes
    assert stat["engines"][0]["engine_id"] == "fake-engine"
    assert [n["id"] for n in stat["namespaces"]] == [filled.ns]
    shown = served.tierkv("stat").stdout
    for word in ("fake-engine", "14 of 64", "64 MiB", filled.ns[:8], "FullAttentionSpec"):
        assert word in shown


def test_ls_rows(served: Served, filled: FakeEngine) -> None:
    rows = {row["id"]: row for row in served.json("ls")["prefixes"]}
    assert set(rows) == {short_id(filled, tokens) for tokens in (A, B, C)}
    row = rows[short_id(filled, A)]
    assert row["key"] == filled.keys(A)[-1].hex()
    assert (row["depth_chunks"], row["depth_blocks"], row["tokens"], row["num_stored"]) == (7, 14, len(A), 7)
    assert row["tiers"] == ["host", "disk"] and row["namespace"] == filled.ns
    assert row["nbytes"]["host"] == 7 * filled.shape.payload_nbytes
    assert row["nbytes"]["disk"] >= 7 * filled.shape.payload_nbytes
    assert row["hits"] == 0 and time.time() - 60 < row["last_used"] <= time.time()


def test_ls_counts_the_hits_of_a_prefix_and_not_of_its_neighbours(served: Served, filled: FakeEngine) -> None:
    filled.get(A)
    filled.forget()
    assert filled.get(A) == filled.expected(A, seed=0) and set(filled.last_sources) == {"disk"}
    filled.get(A)
    rows = served.json("ls")["prefixes"]
    assert rows[0]["id"] == short_id(filled, A), "the most recently used comes first"
    hits = {row["id"]: row["hits"] for row in rows}
    # a pool forgets with its entries what it counted: one from the disk, one from the pool
    assert hits == {short_id(filled, A): 2, short_id(filled, B): 0, short_id(filled, C): 0}


def test_ls_filters(served: Served, filled: FakeEngine) -> None:
    assert len(served.json("ls", "--limit", "2")["prefixes"]) == 2
    assert len(served.json("ls", "--namespace", filled.ns[:6])["prefixes"]) == 3
    sentence(served.tierkv("ls", "--namespace", "0" * 32), 1, "no stored prefix fits")
    whole_key = filled.keys(B)[-1].hex()
    for start in (whole_key[:8], whole_key):
        assert [r["id"] for r in served.json("ls", "--prefix", start)["prefixes"]] == [whole_key[:12]]
    filled.forget()
    assert len(served.json("ls", "--tier", "disk")["prefixes"]) == 3
    assert served.json("ls", "--tier", "host", code=1) == {"prefixes": [], "total": 0}
    assert len(served.json("ls", "--tier", "host", "--tier", "disk")["prefixes"]) == 3
    sentence(served.tierkv("ls", "--tier", "shared"), 4, "'shared'", "host, disk")


def test_ls_after_the_engine_left(served: Served) -> None:
    with FakeEngine(served.socket) as engine:
        engine.put(A)
    wait_until(lambda: not served.json("stat")["server"]["num_engines"])
    assert [row["tiers"] for row in served.json("ls")["prefixes"]] == [["disk"]]


def test_piped_tables_are_plain_and_whole(served: Served, filled: FakeEngine) -> None:
    done = served.tierkv("ls")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    for tokens in (A, B, C):
        assert short_id(filled, tokens) in done.stdout
    assert "tiny-model" in done.stdout and "…" not in done.stdout


def test_a_closed_pipe_is_quiet(served: Served, filled: FakeEngine) -> None:
    command = f"set -o pipefail; {sys.executable} -m tierkv.cli ls --server {served.socket} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.returncode == 0
    command = f"{sys.executable} -m tierkv.cli ls --json --server {served.socket} | head -c 20"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout == '{"prefixes": [{"id":'


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}])
def test_on_a_terminal_of_100_columns(served: Served, filled: FakeEngine, env: dict[str, str]) -> None:
    env = env | {"COLUMNS": "100"}
    _, listing = on_terminal(["ls", "--server", str(served.socket)], env)
    _, stat = on_terminal(["stat", "--server", str(served.socket)], env)
    assert all(short_id(filled, tokens) in listing for tokens in (A, B, C))
    assert "queued" in stat and "misses" in stat
    for shown in (listing, stat):
        assert not _COLOUR.search(shown) or not env.get("NO_COLOR")
        lines = _STYLE.sub("", shown).replace("\r", "").splitlines()
        assert all(len(line) <= 100 for line in lines if not line.startswith(("socket", "disk  ")))


def test_no_color_is_plain_on_a_terminal(served: Served, filled: FakeEngine) -> None:
    args = ["ls", "--server", str(served.socket)]
    assert "\x1b[" in on_terminal(args, {})[1]
    code, shown = on_terminal([*args, "--no-color"], {})
    assert code == 0 and short_id(filled, A) in shown and "\x1b[" not in shown


def test_verify_draws_a_bar_on_a_terminal(served: Served, filled: FakeEngine) -> None:
    code, shown = on_terminal(["verify", "--server", str(served.socket)], {})
    assert code == 0 and "Verifying" in shown and "100%" in shown and "14 records sound" in shown
    code, shown = on_terminal(["verify", "--quiet", "--server", str(served.socket)], {})
    assert code == 0 and not shown


# -- match


@pytest.mark.parametrize("form", ["spaces", "commas", "json", "file", "stdin", "lines"])
def test_match_takes_tokens_in_every_form(served: Served, filled: FakeEngine, form: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(json.dumps(A) if form == "file" else "\n".join(map(str, A)))
    args: dict[str, list[str | Path]] = {
        "spaces": ["--tokens", text(A)],
        "commas": ["--tokens", ", ".join(map(str, A))],
        "json": ["--tokens", json.dumps(A)],
        "file": ["--tokens-file", path],
        "lines": ["--tokens-file", path],
        "stdin": ["--tokens-file", "-"],
    }
    found = served.json("match", *args[form], stdin=json.dumps(A))
    (row,) = found["namespaces"]
    assert found["tokens"] == len(A)
    assert (row["namespace"], row["num_chunks"], row["num_stored"], row["tokens_stored"]) == (filled.ns, 7, 7, len(A))
    assert [chunk["id"] for chunk in row["chunks"]] == [key.hex()[:12] for key in filled.keys(A)]


def test_match_stops_where_the_prompt_leaves_what_is_stored(served: Served, filled: FakeEngine) -> None:
    prompt = [*A[: 5 * CHUNK], *range(9000, 9000 + 2 * CHUNK), 1]
    filled.forget()
    filled.get(A[: 2 * CHUNK])
    (row,) = served.json("match", "--tokens", text(prompt))["namespaces"]
    assert (row["num_chunks"], row["num_stored"]) == (7, 5)
    assert [c["tiers"] for c in row["chunks"]] == [["host", "disk"]] * 2 + [["disk"]] * 3 + [[]] * 2
    shown = served.tierkv("match", "--tokens", text(prompt)).stdout
    assert "5 of 7" in shown and f"{5 * CHUNK} of {len(prompt)}" in shown
    assert "0-1 host,disk; 2-4 disk" in shown and "chunk 5 is not stored" in shown


def test_match_changes_nothing(served: Served, filled: FakeEngine) -> None:
    before = (served.json("ls"), filled.index.dump())
    for _ in range(3):
        served.json("match", "--tokens", text(A))
    assert (served.json("ls"), filled.index.dump()) == before


def test_match_of_nothing(served: Served, filled: FakeEngine) -> None:
    sentence(served.tierkv("match", "--tokens", text(A[: CHUNK - 1])), 1, "fewer than a chunk of 32")
    done = served.tierkv("match", "--tokens", text(range(7000, 7100)))
    assert done.returncode == 1 and "nothing of this prompt is stored" in done.stderr and "0 of 3" in done.stdout
    sentence(served.tierkv("match", "--tokens", text(A), "--namespace", "0" * 32), 1, "no namespace's id starts with")


def test_match_needs_the_salt(served: Served, engine: FakeEngine, tmp_path: Path) -> None:
    engine.put(A, salt="tenant \N{GREEK SMALL LETTER ALPHA}")
    (tmp_path / "salt").write_text("tenant \N{GREEK SMALL LETTER ALPHA}\n")
    assert served.tierkv("match", "--tokens", text(A)).returncode == 1
    assert served.tierkv("match", "--tokens", text(A), "--salt", "other").returncode == 1
    for given in (["--salt", "tenant \N{GREEK SMALL LETTER ALPHA}"], ["--salt-file", str(tmp_path / "salt")]):
        (row,) = served.json("match", "--tokens", text(A), *given)["namespaces"]
        assert row["num_stored"] == 7


def test_match_in_several_namespaces(served: Served, filled: FakeEngine) -> None:
    with FakeEngine(served.socket, make_namespace("fake/other", chunk_tokens=64)) as other:
        other.put(A[: 2 * CHUNK])
        rows = served.json("match", "--tokens", text(A))["namespaces"]
        assert [(r["namespace"], r["tokens_stored"]) for r in rows] == [(filled.ns, len(A)), (other.ns, 2 * CHUNK)]
        rows = served.json("match", "--tokens", text(A), "--namespace", other.ns[:10])["namespaces"]
        assert [r["namespace"] for r in rows] == [other.ns]


# -- evict


def test_evict_by_id_keeps_the_neighbours(served: Served, filled: FakeEngine) -> None:
    plan = served.json("evict", short_id(filled, A), "--dry-run")
    assert plan["dry_run"] and plan["removed"] == {"host": 3, "disk": 3} and plan["num_removed"] == 6
    assert len(served.ids()) == 3, "a dry run removes nothing"
    done = served.json("evict", short_id(filled, A))
    assert done == plan | {"dry_run": False}
    assert done["prefixes"] == [short_id(filled, A)] and done["incomplete"] == []
    assert done["nbytes"]["host"] == 3 * filled.shape.payload_nbytes
    assert sorted(served.ids()) == sorted([short_id(filled, B), short_id(filled, C)])
    assert filled.get(A) == filled.expected(SYSTEM, seed=0), "what B shares is still a hit"
    assert len(filled.get(B)) == 6 and len(filled.get(C)) == 5
    sentence(served.tierkv("evict", short_id(filled, A)), 1, short_id(filled, A))


def test_evict_takes_what_continues_a_prefix(served: Served, filled: FakeEngine) -> None:
    done = served.json("evict", short_id(filled, SYSTEM))
    assert sorted(done["prefixes"]) == sorted([short_id(filled, A), short_id(filled, B)])
    assert done["removed"] == {"host": 9, "disk": 9}
    assert served.ids() == [short_id(filled, C)]


def test_evict_on_chosen_tiers(served: Served, filled: FakeEngine) -> None:
    assert served.json("evict", short_id(filled, C), "--tier", "host")["removed"] == {"host": 5}
    filled.get([])  # the engine takes note
    assert filled.get(C) == filled.expected(C, seed=2) and filled.last_sources == ["disk"] * 5
    assert served.json("evict", short_id(filled, C), "--tier", "disk")["removed"] == {"disk": 5}
    assert filled.get(C) == filled.expected(C, seed=2) and filled.last_sources == ["host"] * 5
    assert served.json("evict", short_id(filled, C), "--tier", "disk", code=1)["num_removed"] == 0
    sentence(served.tierkv("evict", short_id(filled, C), "--tier", "shared"), 4, "'shared'")


def test_evict_by_prompt(served: Served, filled: FakeEngine) -> None:
    prompt = [*A, *range(3)]  # a rest shorter than a chunk
    done = served.json("evict", "--tokens", text(prompt))
    assert done["prefixes"] == [short_id(filled, A)] and done["removed"] == {"host": 3, "disk": 3}
    assert filled.get(prompt) == filled.expected(SYSTEM, seed=0)
    # again: all that is left of it belongs to B as well
    sentence(served.tierkv("evict", "--tokens", text(prompt)), 1, "nothing stored fits")
    assert len(filled.get(B)) == 6
    sentence(served.tierkv("evict", "--tokens", "1 2 3"), 1, "no whole chunk")


def test_evict_by_prompt_minds_the_tenant(served: Served, filled: FakeEngine) -> None:
    filled.put(A, seed=7, salt="alice")
    assert served.json("evict", "--tokens", text(A), "--salt", "alice")["removed"] == {"host": 7, "disk": 7}
    assert filled.get(A, salt="alice") == [] and len(filled.get(A)) == 7


def test_evict_by_ids_that_fit_nothing_or_several(served: Served, engine: FakeEngine) -> None:
    prompts = [[i] * CHUNK for i in range(40)]
    for prompt in prompts:
        engine.put(prompt)
    first = [short_id(engine, prompt)[0] for prompt in prompts]
    common = max(set(first), key=first.count)
    sentence(served.tierkv("evict", common), 4, repr(common), "more digits")
    missing = next(d for d in ("f" * 12, "0" * 12) if d not in served.ids())
    sentence(served.tierkv("evict", missing), 1, missing)
    sentence(served.tierkv("evict", "not-an-id"), 2, "not-an-id")
    assert len(served.ids()) == 40


def test_evict_a_namespace_needs_a_yes(served: Served, filled: FakeEngine) -> None:
    sentence(served.tierkv("evict", "--namespace", filled.ns[:8]), 2, filled.ns, "--yes")
    sentence(served.tierkv("evict", "--namespace", filled.ns, "--json"), 2, "--yes")
    code, shown = on_terminal(["evict", "--namespace", filled.ns, "--server", str(served.socket)], {}, "n\n")
    assert code == 4 and "Remove 28 chunks" in shown
    assert len(served.ids()) == 3
    assert served.json("evict", "--namespace", filled.ns, "--dry-run")["removed"] == {"host": 14, "disk": 14}
    code, shown = on_terminal(["evict", "--namespace", filled.ns, "--server", str(served.socket)], {}, "y\n")
    assert code == 0 and "Removed 3 prefixes" in shown
    assert served.ids() == [] and filled.get(A) == []
    filled.put(A)
    assert filled.get(A) == filled.expected(A), "the engine goes on in its namespace"


def test_evict_one_namespace_of_several(served: Served, filled: FakeEngine) -> None:
    with FakeEngine(served.socket, make_namespace("fake/other")) as other:
        other.put(A)
        assert served.json("evict", "--namespace", other.ns, "--yes")["removed"] == {"host": 7, "disk": 7}
    assert len(served.ids()) == 3


def test_evict_reaches_every_engine(served: Served, filled: FakeEngine) -> None:
    with FakeEngine(served.socket, engine_id="second") as second:
        second.put(A)
        assert served.json("evict", short_id(filled, A), "--dry-run")["removed"] == {"host": 6, "disk": 3}
        assert served.json("evict", short_id(filled, A))["removed"] == {"host": 6, "disk": 3}
        assert len(second.get(A)) == len(filled.get(A)) == 4


def test_evict_says_which_engine_was_not_reached(served: Served, filled: FakeEngine) -> None:
    filled.forget()
    filled.mute = True
    done = served.tierkv("evict", short_id(filled, A))
    filled.mute = False
    assert done.returncode == 4 and "engine fake-engine did not answer" in done.stderr
    assert short_id(filled, A) in done.stdout


def test_ctrl_c_is_quiet(served: Served, filled: FakeEngine) -> None:
    filled.mute = True
    command = [sys.executable, "-m", "tierkv.cli", "stat", "--server", str(served.socket)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    shown, said = process.communicate(timeout=30)
    filled.mute = False
    assert (process.returncode, shown, said.strip()) == (130, "", "")


def test_evicting_from_a_tier_that_has_none_of_it(served: Served, filled: FakeEngine) -> None:
    filled.forget()
    (row, *_) = served.json("ls")["prefixes"]
    sentence(served.tierkv("evict", row["id"], "--tier", "host"), 1, "nothing that fits is in host")


# -- with a shared tier


@pytest.mark.skipif(not server_binaries(), reason="neither Redis nor Valkey is installed")
def test_the_shared_tier(tmp_path: Path) -> None:
    redis = start_redis(tmp_path)
    try:
        first = Served(tmp_path / "one", "--set", "shared.spill=through", env={"TIERKV_SHARED_URL": redis.url})
        with FakeEngine(first.socket) as engine:
            engine.put(A)
            with AdminClient(first.socket) as client:
                assert client.call("TKV.DRAIN", 10) == b"1"
            (row,) = first.json("ls")["prefixes"]
            assert row["tiers"] == ["host", "disk", "shared"]
            second = Served(tmp_path / "two", "--shared-url", redis.url)
            assert second.json("ls")["prefixes"][0]["tiers"] == ["shared"]
            with FakeEngine(second.socket) as other:
                assert other.get(A) == other.expected(A) and set(other.last_sources) == {"shared"}
            done = first.json("evict", "--tokens", text(A))
            assert done["removed"] == {"host": 7, "disk": 7, "shared": 7}
            redis.kill()
            engine.put(B)
            done_now = wait_until(lambda: _out(first), what="the shared tier is still up")
            assert done_now.returncode == 4 and "the shared tier is out" in done_now.stderr
            assert "shared: out, for" in first.tierkv("stat").stdout
        assert first.stop()[0] == second.stop()[0] == 0
    finally:
        redis.kill()


def _out(served: Served) -> subprocess.CompletedProcess[str] | None:
    done = served.tierkv("evict", "--tokens", text(C[:CHUNK]))
    return done if done.returncode == 4 else None
