"""Every verb of the command line on an empty store, a large and a damaged one, and in every way that it can go wrong.

The verbs come from the parser: one without an entry in :data:`ENTRIES` fails here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
from redis import Redis
from rich.cells import cell_len

import many_blocks
from cli_tools import as_json, on_terminal, refused, tierkv
from fake_engine import FakeEngine, payload_bytes, wait_until
from leaks import stop_process
from network import host_port, insecure_config, make_tokens, tls_config
from servers import RedisServer, free_port, make_certificates, server_binaries, start_redis
from serving import make_config, serving
from store_process import store_server
from tierkv import admin_client
from tierkv.admin_client import AdminClient
from tierkv.cli import VERBS, cli
from tierkv.errors import UnavailableError
from tierkv.keys import tenant_digest
from tierkv.sessions import SessionTurn, session_digest
from tierkv_server import commands
from tierkv_server.server import Server

pytestmark = pytest.mark.skipif(not server_binaries(), reason="neither Redis nor Valkey is installed")

CHUNK = 32
PROMPT = list(range(7000, 7000 + 6 * CHUNK))
NEIGHBOUR = [*PROMPT[: 3 * CHUNK], *range(9000, 9000 + 2 * CHUNK)]
NOBODYS = "ffff" * 16
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_COLOUR = re.compile(r"\x1b\[(?:\d+;)*[39][0-7]m")
DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


@dataclass
class Store:
    """A store that a server runs, and what is in it."""

    at: tuple[str, ...]
    directory: Path
    server: Server
    prompt: list[int] = field(default_factory=lambda: PROMPT)
    id: str = "12ab"
    other: str = ""
    num_chunks: int = 0
    num_prefixes: int = 0
    engine: FakeEngine | None = None

    @property
    def text(self) -> str:
        return " ".join(map(str, self.prompt))

    @property
    def file(self) -> Path:
        """A file that ``export`` wrote."""
        path = self.directory / "exported.safetensors"
        if not path.exists() and self.num_chunks:
            assert tierkv("export", path, self.id, *self.at).code == 0
        elif not self.num_chunks:
            path.write_bytes(b"")
        return path


Args = Callable[[Store], list[Any]]


@dataclass
class Entry:
    """What a verb does in each place.

    Attributes:
        args: what it is given, on a store that has something; as far as it can, it changes nothing.
        empty, large, damaged: exit codes on those stores.
        shape: the names in its JSON object; empty: it has no ``--json``.
        bad: arguments that are bad usage.
        nothing: arguments that nothing fits.
        role: whose token it takes; empty: none, or it says in its own way what is wrong with a server.
        server: whether it takes the options that name a server.
        check: looks at the JSON object of the large store.
        acts: arguments that take the role's token, where ``args`` take less.
    """

    args: Args
    shape: str = ""
    empty: int = 1
    large: int = 0
    damaged: int = 0
    server: bool = True
    bad: tuple[str, ...] = ("--nope",)
    nothing: Args | None = None
    role: str = "reader"
    check: Callable[[Any, Store], None] = lambda found, store: None
    acts: Args | None = None


def _nobodys(*more: str) -> Args:
    return lambda store: [NOBODYS, *more]


def _same(**wanted: Any) -> Callable[[Any, Store], None]:
    """Return a check that the object has these values."""

    def check(found: Any, store: Store) -> None:
        assert {name: found[name] for name in wanted} == wanted

    return check


def _check_bench(found: Any, store: Store) -> None:
    assert [(row["tier"], row["op"]) for row in found["results"]] == [("disk", "match"), ("shared", "match")]
    assert found["num_evicted"] == {"disk": 0, "shared": 0}


def _check_compact(found: Any, store: Store) -> None:
    (row,) = [row for row in found["namespaces"] if row["num_chunks"]]
    assert found["dry_run"] and row["num_chunks"] == store.num_chunks and found["num_bad"] == 0
    assert found["freed_nbytes"] == found["before_nbytes"] - found["after_nbytes"] >= 0


def _check_du(found: Any, store: Store) -> None:
    assert found["total"]["num_chunks"] == store.num_chunks
    assert found["total"]["chunks"]["disk"] == store.num_chunks
    assert found["num_rows"] == len(found["rows"]) >= 3


def _check_events(found: Any, store: Store) -> None:
    assert (found["kind"] in ("store", "fetch", "evict") and found["id"]) or not found["id"]


def _check_ls(found: Any, store: Store) -> None:
    assert found["total"] == len(found["prefixes"]) == store.num_prefixes
    assert len({row["id"] for row in found["prefixes"]}) == store.num_prefixes
    assert {row["num_stored"] for row in found["prefixes"]} == {many_blocks.SYSTEM_CHUNKS + many_blocks.OWN_CHUNKS}


def _check_match(found: Any, store: Store) -> None:
    row = found["namespaces"][0]
    assert row["model"] == many_blocks.NAMESPACE.model
    assert (row["num_stored"], row["num_chunks"], row["tokens_stored"]) == (40, 40, len(store.prompt))
    assert {tuple(chunk["tiers"]) for chunk in row["chunks"]} == {("disk", "shared")}


def _check_ns(found: Any, store: Store) -> None:
    assert [row["num_chunks"] for row in found["namespaces"] if row["num_chunks"]] == [store.num_chunks]


def _check_show(found: Any, store: Store) -> None:
    assert (found["num_stored"], found["depth_chunks"], len(found["chunks"])) == (40, 40, 40)


def _check_stat(found: Any, store: Store) -> None:
    tiers = {tier["name"]: tier for tier in found["tiers"]}
    assert tiers["disk"]["num_entries"] == store.num_chunks
    assert tiers["shared"]["num_entries"] == many_blocks.NUM_SHARED * 30 + 10


def _check_tree(found: Any, store: Store) -> None:
    (space,) = [space for space in found["namespaces"] if space["num_chunks"]]
    (root,) = space["roots"]
    assert space["num_chunks"] == store.num_chunks and root["num_prefixes"] == store.num_prefixes
    assert len(root["children"]) + root["num_hidden"] == many_blocks.NUM_PROMPTS


def _check_verify(found: Any, store: Store) -> None:
    shared = many_blocks.NUM_SHARED * 30 + 10
    assert (found["num_ok"], found["num_bad"], found["num_total"]) == (
        store.num_chunks + shared, 0, store.num_chunks + shared,
    )  # fmt: skip


_LIFETIME = "dry_run id namespace num_chunks stored nbytes tiers incomplete"
ENTRIES: dict[str, Entry] = {
    "bench": Entry(
        lambda s: ["--duration", "0.05", "--payload", "4KiB", "--size", "256KiB", "--op", "match"],
        "version address transport num_clients seconds nbytes results skipped num_evicted num_left",
        empty=0,
        bad=("--payload", "1"),
        role="admin",
        check=_check_bench,
    ),
    "compact": Entry(
        lambda s: ["--dry-run"],
        "dry_run before_nbytes after_nbytes freed_nbytes num_bad namespaces",
        damaged=1,
        bad=("--rate", "fast"),
        nothing=lambda s: ["--namespace", "ffff"],
        role="admin",
        check=_check_compact,
    ),
    "copy": Entry(
        lambda s: [s.at[1] if s.at else "none.sock", s.other, s.id, "--dry-run"],
        "dry_run source destination num_chunks num_copied num_there num_bad num_gone num_refused num_host nbytes "
        "namespaces",
        bad=("none.sock",),
        nothing=lambda s: [s.at[1], s.other, NOBODYS],
        role="",
        server=False,
    ),
    "config": Entry(lambda s: ["show"], "", empty=0, bad=("show", "/not/there.toml"), role="", server=False),
    "doctor": Entry(
        lambda s: [],
        "findings",
        empty=0,
        bad=("--config",),
        role="",
    ),
    "du": Entry(
        lambda s: ["--by", "depth"],
        "by total num_rows rows",
        bad=("--by", "colour"),
        nothing=lambda s: ["--namespace", NOBODYS[:32]],
        check=_check_du,
    ),
    "events": Entry(lambda s: ["--once"], bad=("--kind", "x"), nothing=lambda s: ["--once", "--namespace", "ffff"]),
    "evict": Entry(
        lambda s: [s.id, "--dry-run"],
        "dry_run prefixes removed nbytes num_removed num_pinned pinned incomplete",
        bad=(),
        nothing=_nobodys(),
        role="admin",
        check=_same(dry_run=True, num_removed=60, num_pinned=0, removed={"host": 0, "disk": 30, "shared": 30}),
    ),
    "export": Entry(
        lambda s: [s.directory / "x.safetensors", s.id],
        "file namespace num_chunks nbytes",
        damaged=4,
        bad=("x.safetensors",),
        nothing=lambda s: [s.directory / "none", NOBODYS],
        role="admin",
        check=_same(num_chunks=40),
    ),
    "import": Entry(
        lambda s: [s.file, "--dry-run"],
        "dry_run file namespace model num_chunks num_stored num_there nbytes",
        empty=2,
        bad=("/not/there",),
        role="admin",
        check=_same(dry_run=True, num_chunks=40),
        acts=lambda s: [s.file],
    ),
    "ls": Entry(
        lambda s: [],
        "prefixes total",
        bad=("--limit", "0"),
        nothing=lambda s: ["--prefix", NOBODYS],
        check=_check_ls,
    ),
    "match": Entry(
        lambda s: ["--tokens", s.text],
        "tokens namespaces",
        bad=("--tokens", "1 two"),
        nothing=lambda s: ["--tokens", "5 " * 64],
        check=_check_match,
    ),
    "ns": Entry(
        lambda s: [], "namespaces", bad=("--namespace", "x"), nothing=lambda s: ["--namespace", "ffff"], check=_check_ns
    ),
    "pin": Entry(
        lambda s: [s.id, "--for", "1h", "--dry-run", "--owner", "ops"],
        f"{_LIFETIME} owner until",
        bad=("12ab",),
        nothing=_nobodys("--for", "1h"),
        role="admin",
        check=_same(num_chunks=40, stored={"disk": 40, "shared": 40}, tiers={}),
    ),
    "report": Entry(
        lambda s: ["-o", s.directory / "report.html"],
        "version created server tiers advice reuse usage",
        empty=0,
        bad=("--json", "-o", "-"),
        check=lambda found, store: _check_du(found["usage"]["age"] | {"num_rows": 3, "rows": [1, 2, 3]}, store),
    ),
    "serve": Entry(lambda s: ["--help"], empty=0, bad=("--disk-bytes", "12 parsecs"), role="", server=False),
    "session": Entry(
        lambda s: ["ls"],
        "sessions",
        bad=("release",),
        nothing=lambda s: ["ls", "--tenant", "ffff"],
    ),
    "show": Entry(
        lambda s: [s.id],
        "id key namespace model chunk_tokens payload_nbytes tenant depth_chunks num_stored nbytes chunks",
        bad=(),
        nothing=_nobodys(),
        check=_check_show,
    ),
    "slow": Entry(
        lambda s: [],
        "slow_s operations",
        bad=("--over", "soon"),
        nothing=lambda s: ["--over", "7d"],
    ),
    "stat": Entry(lambda s: [], "server tiers engines namespaces", empty=0, check=_check_stat),
    "top": Entry(
        lambda s: ["--once", "--interval", "0.2"],
        "seconds num_engines tiers engines hottest",
        empty=0,
        bad=("--json",),
    ),
    "tree": Entry(lambda s: [], "namespaces", bad=("--limit", "0"), nothing=_nobodys(), check=_check_tree),
    "ttl": Entry(
        lambda s: [s.id, "--in", "1h", "--dry-run"],
        f"{_LIFETIME} until",
        bad=("12ab",),
        nothing=_nobodys("--in", "1h"),
        role="admin",
        check=_same(num_chunks=30, stored={"disk": 30, "shared": 30}, tiers={}),
    ),
    "unpin": Entry(
        lambda s: [s.id, "--dry-run"],
        _LIFETIME,
        bad=(),
        nothing=_nobodys(),
        role="admin",
        check=_same(num_chunks=40, stored={"disk": 40, "shared": 40}, tiers={}),
    ),
    "verify": Entry(
        lambda s: [],
        "num_total num_done num_ok num_gone num_failed nbytes num_bad bad",
        damaged=4,
        bad=("--tier", "host"),
        nothing=_nobodys(),
        role="admin",
        check=_check_verify,
    ),
    "warm": Entry(
        lambda s: [s.id, "--dry-run"],
        "dry_run num_chunks num_warmed num_there num_missing num_dropped nbytes",
        bad=(),
        nothing=_nobodys(),
        role="admin",
        check=_same(num_chunks=40, num_warmed=0, num_there=40),
    ),
}
ASKING = [verb for verb, entry in ENTRIES.items() if entry.role]
WITH_JSON = [verb for verb, entry in ENTRIES.items() if entry.shape]


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the commands that do something, with the words that name them."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from leaves(found, (*path, name))
    else:
        yield path, command


# -- the stores


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TIERKV_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def redis(directory: Path) -> Iterator[RedisServer]:
    server = start_redis(directory)
    yield server
    server.kill()


@pytest.fixture
def empty(short_dir: Path, redis: RedisServer) -> Iterator[Store]:
    (short_dir / "data").mkdir()
    url = f"redis://127.0.0.1:{redis.port}/1"
    with serving(make_config(short_dir, shared_url=url)) as server:
        other = f"redis://127.0.0.1:{redis.port}/3"
        yield Store(("--server", str(server.config.socket)), short_dir / "data", server, other=other)
    Redis(port=redis.port, db=1).flushdb()


@pytest.fixture(scope="module")
def large(directory: Path) -> Iterator[Store]:
    """A hundred thousand chunks on the disk, some in the shared tier too; an engine, a session, a slow operation."""
    (directory / "large").mkdir()
    own = start_redis(directory / "large")
    config = make_config(directory / "large", shared_url=own.url, disk_bytes=2 << 30)
    with serving(config) as server, FakeEngine(config.socket) as engine:
        many_blocks.fill(server)
        ns_id = many_blocks.NAMESPACE.ns_id()
        key = many_blocks.keys(3)[-1]
        server.service.events.note("fetch", ns_id, key, {"disk": 2}, engine="fake-engine", seconds=1.5)
        tenant = tenant_digest(b"")
        engine.client.turn(SessionTurn(session_digest(tenant, "chat"), tenant, b"".join(engine.keys(PROMPT)), 60.0))
        table = server.service.session_table
        assert table is not None
        wait_until(lambda: as_json_sessions(server))
        yield Store(
            ("--server", str(config.socket)),
            directory / "large",
            server,
            many_blocks.prompt(3),
            key.hex()[:12],
            f"redis://127.0.0.1:{own.port}/3",
            many_blocks.NUM_CHUNKS,
            many_blocks.NUM_PROMPTS,
            engine,
        )
    own.kill()


def as_json_sessions(server: Server) -> bool:
    with AdminClient(server.config.socket) as client:
        return bool(client.ask("TKV.SESSIONS"))


@pytest.fixture
def damaged(short_dir: Path, redis: RedisServer) -> Iterator[Store]:
    """Two prompts; a chunk of the first is damaged on the disk, and that and another in the shared tier."""
    (short_dir / "data").mkdir()
    url, client = f"redis://127.0.0.1:{redis.port}/2", Redis(port=redis.port, db=2)
    with serving(make_config(short_dir, shared_url=url)) as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        engine.put(NEIGHBOUR)
        with AdminClient(server.config.socket) as admin:
            assert admin.call("TKV.DRAIN", 10) == b"1"
        server.service.events.note("fetch", engine.namespace.ns_id(), engine.keys(PROMPT)[-1], {"damaged": 1})
        tenant = tenant_digest(b"")
        engine.client.turn(SessionTurn(session_digest(tenant, "chat"), tenant, b"".join(engine.keys(PROMPT)), 0.0))
        wait_until(lambda: as_json_sessions(server))
        keys = engine.keys(PROMPT)
        damage_on_disk(server, engine, keys[4])
        for key in keys[4:]:
            (name,) = client.keys(f"*:{key.hex()}")
            client.setrange(name, 600, b"damaged")
        engine.forget()
        store = Store(("--server", str(server.config.socket)), short_dir / "data", server, PROMPT, keys[-1].hex()[:12])
        store.other = f"redis://127.0.0.1:{redis.port}/3"
        yield store
    client.flushdb()


def damage_on_disk(server: Server, engine: FakeEngine, key: bytes) -> None:
    """Change a byte of a record's payload behind the server's back."""
    path = server.config.disk_dir / "ns" / engine.ns / "data.mdb"
    at = path.read_bytes().find(payload_bytes(key, 0, engine.shape.payload_nbytes)[:512])
    assert at > 0
    with path.open("r+b") as file:
        file.seek(at + 100)
        byte = file.read(1)[0]
        file.seek(at + 100)
        file.write(bytes([byte ^ 0xFF]))


# -- the table is whole


def test_every_verb_has_an_entry() -> None:
    assert set(ENTRIES) == set(VERBS)


def test_every_command_says_what_it_does_with_examples() -> None:
    for path, command in leaves(cli):
        said = tierkv(*path, "--help")
        assert said.code == 0 and not said.err, path
        assert "Examples:" in said.out and f"  tierkv {path[0]}" in said.out, path
        assert all(len(line) <= 110 for line in said.out.splitlines()), path
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help or option.hidden, (path, option.name)


# -- on each store


@pytest.mark.parametrize("verb", ENTRIES)
def test_on_an_empty_store(empty: Store, verb: str) -> None:
    entry = ENTRIES[verb]
    where = empty.at if entry.server else ()
    said = tierkv(verb, *entry.args(empty), *where)
    if entry.empty:
        refused(said, entry.empty)
    else:
        assert said.code == 0 and not said.err and said.out, said
    if entry.shape and entry.empty == 1 and verb not in ("show", "pin", "unpin", "ttl", "warm", "export", "copy"):
        found = as_json(verb, *entry.args(empty), *where, code=1)
        assert set(found) == set(entry.shape.split())


@pytest.mark.parametrize("verb", ENTRIES)
def test_on_100_000_blocks(large: Store, verb: str) -> None:
    entry = ENTRIES[verb]
    said = tierkv(verb, *entry.args(large), *(large.at if entry.server else ()))
    assert said.code == entry.large and bool(said.err) == bool(entry.large), said
    assert said.out.strip()
    assert not [line for line in said.out.splitlines() if line != line.rstrip()], "lines end in spaces"


@pytest.mark.parametrize("verb", WITH_JSON)
def test_json_has_its_documented_shape(large: Store, verb: str) -> None:
    entry = ENTRIES[verb]
    found = as_json(verb, *entry.args(large), *(large.at if entry.server else ()))
    assert set(found) == set(entry.shape.split())
    entry.check(found, large)
    section = "".join(part for part in re.split(r"(?m)^(?=## )", DOCS) if re.match(rf"## .*\b{verb}\b", part))
    assert section, "it is not documented"
    for name in entry.shape.split():
        assert f'"{name}"' in section or f"`{name}`" in section, f"docs/cli.md does not name {name!r}"


@pytest.mark.parametrize("verb", ENTRIES)
def test_on_a_damaged_store(damaged: Store, verb: str) -> None:
    entry = ENTRIES[verb]
    if verb == "import":
        path = damaged.directory / "broken.safetensors"
        path.write_bytes(b"\x10\0\0\0\0\0\0\0{not json")
        refused(tierkv(verb, path, *damaged.at), 2, str(path))
        return
    said = tierkv(verb, *entry.args(damaged), *(damaged.at if entry.server else ()))
    assert said.code == entry.damaged, said
    assert said.err.count("\n") == (1 if entry.damaged else 0), said
    if verb == "verify":
        found = as_json(verb, *damaged.at, code=4)
        assert {(row["tier"], row["deleted"]) for row in found["bad"]} == {("disk", False), ("shared", False)}
        assert found["num_bad"] == 3 and found["num_ok"] == found["num_total"] - 3
        assert as_json(verb, "--repair", *damaged.at)["num_bad"] == 3
        assert as_json(verb, *damaged.at)["num_bad"] == 0
    if verb == "export":
        assert "damaged" in said.err and not list(damaged.directory.glob("*.safetensors*")), "no half of a file"


# -- in every way that it can go wrong


@pytest.mark.parametrize("verb", ASKING)
def test_a_server_that_is_not_there(verb: str, short_dir: Path) -> None:
    nowhere = ("--server", f"unix://{short_dir}/none.sock")
    refused(tierkv(verb, *_plain_args(verb, short_dir), *nowhere), 3, f"{short_dir}/none.sock", "tierkv serve")
    port = free_port()
    refused(tierkv(verb, *_plain_args(verb, short_dir), "--server", f"tkv://127.0.0.1:{port}"), 3, str(port))


def _plain_args(verb: str, directory: Path) -> list[Any]:
    """Return arguments that are right, about nothing in particular."""
    store = Store((), directory, None)  # type: ignore[arg-type]
    if verb == "import":
        return [_exported(directory)]
    return ENTRIES[verb].args(store)


def _exported(directory: Path) -> Path:
    """Return a good file of an export."""
    path = directory / "good.safetensors"
    if not path.exists():
        with serving(make_config(directory / "exporter")) as server, FakeEngine(server.config.socket) as engine:
            engine.put(PROMPT)
            last = engine.keys(PROMPT)[-1].hex()
            assert tierkv("export", path, last, "--server", server.config.socket).code == 0
    return path


@pytest.mark.parametrize("verb", ASKING)
def test_a_token_that_is_wrong_and_one_that_is_not_enough(
    verb: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "AUTH_DELAY_S", 0.0)
    tokens = make_tokens(short_dir)
    wrong = short_dir / "wrong"
    wrong.write_text("0123456789abcdef0123\n")
    wrong.chmod(0o600)
    entry = ENTRIES[verb]
    named = {f"{role}_token_file": path for role, path in tokens.items()}
    with serving(insecure_config(short_dir, **named)) as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        store = Store(("--server", str(server.config.socket)), short_dir, server, id=engine.keys(PROMPT)[-1].hex()[:12])
        store.num_chunks = len(engine.keys(PROMPT))
        args, at = (entry.acts or entry.args)(store), ("--server", "tkv://{}:{}".format(*host_port(server.config)))
        refused(tierkv(verb, *args, *at), 4, "asks for a token", "--token-file")
        refused(tierkv(verb, *args, *at, "--token-file", wrong), 4, "does not take the token", str(wrong))
        refused(tierkv(verb, *args, *at, "--token-file", short_dir / "none"), 2, str(short_dir / "none"))
        less = "engine" if entry.role == "reader" else "reader"
        said = tierkv(verb, *args, *at, "--token-file", tokens[less])
        refused(said, 4, f"the {less}'s token does not allow", "the admin's")
        enough = tierkv(verb, *args, *at, "--token-file", tokens[entry.role])
        assert "does not allow" not in enough.err and "token" not in enough.err, enough


@pytest.mark.parametrize("verb", ENTRIES)
def test_bad_usage(verb: str, empty: Store) -> None:
    entry = ENTRIES[verb]
    where = empty.at if entry.server else ()
    said = tierkv(verb, *entry.bad, *where)
    assert said.code == 2 and said.err.startswith("tierkv: ") and said.err.count("\n") == 1, said
    assert not said.out
    refused(tierkv(verb, *entry.args(empty), "--nope", *where), 2, "--nope", f"tierkv {verb}")


@pytest.mark.parametrize("verb", [verb for verb, entry in ENTRIES.items() if entry.nothing])
def test_nothing_matches(verb: str, large: Store) -> None:
    nothing, where = ENTRIES[verb].nothing, large.at if ENTRIES[verb].server else ()
    assert nothing is not None
    refused(tierkv(verb, *nothing(large), *where), 1)
    quiet = tierkv(verb, *nothing(large), *where, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (1, "", "")


@pytest.mark.parametrize("verb, reader", [*((verb, "head -c 20") for verb in ENTRIES), ("ls", "true")])
def test_standard_output_is_closed_early(verb: str, reader: str, large: Store) -> None:
    entry = ENTRIES[verb]
    words = [
        sys.executable,
        "-m",
        "tierkv.cli",
        verb,
        *map(str, entry.args(large)),
        *(large.at if entry.server else ()),
    ]
    script = 'reader=$1; shift; set -o pipefail; "$@" | $reader'
    done = subprocess.run(["bash", "-c", script, "bash", reader, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (entry.large, ""), done


#: Verbs that draw a table, or (without one) use colours.
TABLES = ["bench", "compact", "du", "evict", "ls", "match", "ns", "session", "show", "slow", "stat", "top"]
LINES = ["doctor", "events", "tree"]


@pytest.mark.parametrize("verb", [*TABLES, *LINES])
def test_on_a_narrow_terminal_without_colours(verb: str, large: Store) -> None:
    args = [verb, *map(str, ENTRIES[verb].args(large)), *large.at]
    if verb == "ls":
        args += ["--limit", "20"]
    code, shown = on_terminal(args, {"COLUMNS": "40", "NO_COLOR": "1"})
    assert code == 0 and "Traceback" not in shown and not _COLOUR.search(shown)
    lines = _STYLE.sub("", shown).replace("\r", "").splitlines()
    rules = [line for line in lines if line and not line.strip("─")]
    assert rules or verb in LINES, "a table"
    assert all(cell_len(line) <= 40 for line in rules)
    wide = tierkv(verb, *map(str, ENTRIES[verb].args(large)), *large.at).out
    assert "…" not in wide, "a pipe is not cut"


# -- a server that is slow, or stopped


def test_a_stopped_server_is_noticed(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_client, "PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(admin_client, "ALIVE_TIMEOUT_S", 0.5)
    config = make_config(short_dir)
    with store_server(config, short_dir / "log") as pid:
        client = AdminClient(config.socket, timeout_s=20)
        stop_process(pid)
        try:
            with pytest.raises(UnavailableError, match=r"does not answer \(timed out\); it may be stopped"):
                client.call("TKV.STAT")
            refused(tierkv("stat", "--server", config.socket), 3, "does not answer", "may be stopped")
        finally:
            os.kill(pid, signal.SIGCONT)
        client.close()


def test_a_server_that_works_on_its_answer_is_waited_for(empty: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_client, "PROBE_EVERY_S", 0.05)
    inspector = type(empty.server.commands.inspector)
    stat = inspector.stat

    def slow(self: Any) -> Any:
        time.sleep(0.6)
        return stat(self)

    monkeypatch.setattr(inspector, "stat", slow)
    assert tierkv("stat", *empty.at).code == 0
    refused(tierkv("stat", *empty.at, "--timeout", "0.2s"), 3, "timed out after 0.2 s")
    refused(tierkv("stat", *empty.at, "--timeout", "0"), 2, "--timeout")


def test_the_wrong_scheme_is_said(short_dir: Path) -> None:
    files, tokens = make_certificates(short_dir / "tls"), make_tokens(short_dir)
    with serving(tls_config(short_dir, files, tokens)) as server:
        at = "tkv://{}:{}".format(*host_port(server.config))
        refused(tierkv("stat", "--server", at), 3, "speaks TLS", at.replace("tkv:", "tkvs:"))
        refused(tierkv("stat", "--server", at, "--token-file", tokens["reader"]), 3, "speaks TLS")
    with serving(insecure_config(short_dir / "plain")) as server:
        at = "tkvs://{}:{}".format(*host_port(server.config))
        said = tierkv("stat", "--server", at, "--token-file", tokens["reader"], "--ca-file", files.ca)
        refused(said, 3, "does not speak TLS", "tkv://")
