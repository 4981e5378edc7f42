"""``tierkv copy``: prefixes from one store server or Redis to another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from tierkv.cli import IncompleteError, NothingMatchedError
from tierkv.cli.options import (
    Size,
    Span,
    flag,
    hex_start,
    json_option,
    look_options,
    namespace_option,
    namespace_start,
    print_json,
    tenant_option,
    tenant_start,
    tier_option,
)
from tierkv.errors import ConfigError, RefusedError, TierKVError, UnavailableError
from tierkv.selection import Select

if TYPE_CHECKING:
    from tierkv.cli.places import RedisPlace, ServerPlace
    from tierkv.copying import Copier

F = TypeVar("F", bound=Callable[..., Any])

_EXAMPLES = """\b
Examples:
  tierkv copy ~/.cache/tierkv/tierkv.sock redis://cache:6379/0
  tierkv copy redis://old:6379/0 rediss://new:6380/0 --dst-password-file new-password --rate 200MiB
  tierkv copy tkvs://node1:6390 tkvs://node2:6390 ccae6962a8f4 --src-token-file t1 --dst-token-file t2
  tierkv copy redis://cache:6379/0 tierkv.sock --used-within 1d --dry-run"""
#: What reaches a place; which of them are of use depends on its kind.
_FILES = {
    "token_file": "token to show to the server {}",
    "ca_file": "who signed the certificate of {} (tkvs://, rediss://)",
    "cert_file": "your own certificate, where {} asks for one",
    "key_file": "its key",
    "password_file": "password of the Redis {}",
}
_REDIS = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", "redis+unix")


def _place_options(function: F) -> F:
    """Add what says how the two places are reached."""
    for side, role in (("dst", "DST"), ("src", "SRC")):
        function = click.option(
            f"--{side}-redis-prefix",
            metavar="TEXT",
            help=f"Start of the names of all keys in the Redis {role} [tierkv].",
        )(function)
        for name, what in reversed(_FILES.items()):
            function = click.option(
                f"--{side}-{name.replace('_', '-')}", metavar="FILE", help=f"File: {what.format(role)}."
            )(function)
    return function


@click.command("copy", epilog=_EXAMPLES)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.argument("prefixes", metavar="[ID]...", nargs=-1)
@namespace_option
@tenant_option
@tier_option
@click.option("--prefix", metavar="ID", help="Only prefixes whose id starts with ID.")
@click.option("--older-than", type=Span(), default=0.0, help="Only what was stored longer ago than TIME, such as 7d.")
@click.option("--newer-than", type=Span(), default=0.0, help="Only what was stored within TIME.")
@click.option("--unused-for", type=Span(), default=0.0, help="Only what was not used for TIME.")
@click.option("--used-within", type=Span(), default=0.0, help="Only what was used within TIME.")
@click.option("--min-size", type=Size(), default=0, help="Only prefixes of at least SIZE over all tiers.")
@click.option("--max-size", type=Size(), default=0, help="Only prefixes of at most SIZE over all tiers.")
@click.option("--pinned/--not-pinned", default=None, help="Only prefixes that are pinned, or that are not.")
@click.option("--no-ttl", is_flag=True, help="Let copies expire as DST's limits say, not when the originals do.")
@click.option("--any-layout", is_flag=True, help="Also where engines at DST keep a model in another layout.")
@click.option("--make-room", is_flag=True, help="Let what is least used at DST go where there is no room.")
@click.option("--rate", "--limit-rate", type=Size(), default=0, help="Copy at most SIZE a second.")
@click.option("--dry-run", is_flag=True, help="Say what would be copied, and copy nothing.")
@_place_options
@json_option
@look_options
def command(
    source: str,
    destination: str,
    prefixes: tuple[str, ...],
    namespace: str | None,
    tenant: str,
    tiers: tuple[str, ...],
    prefix: str | None,
    older_than: float,
    newer_than: float,
    unused_for: float,
    used_within: float,
    min_size: int,
    max_size: int,
    pinned: bool | None,
    no_ttl: bool,
    any_layout: bool,
    make_room: bool,
    rate: int,
    dry_run: bool,
    as_json: bool,
    **given: str | None,
) -> None:
    """Copy stored prefixes, their ancestors included, from SRC to DST: all, those that fit, or those with an ID.

    SRC and DST are store servers (a socket's path, unix:///path, tkvs://host:port) or Redis (redis://, rediss://, their
    Sentinel and Cluster forms, redis+unix:///path). A server is read from its disk and its shared tier, and written to
    its disk. Every payload is verified on the way. What is at DST already is not sent, so that a copy that was
    interrupted goes on where it stopped when the same command is given again.
    """
    select = Select(
        ns=namespace_start(namespace),
        prefix="" if prefix is None else hex_start(prefix, "prefix"),
        tenant=tenant_start(tenant),
        tiers=list(tiers),
        older_s=older_than,
        newer_s=newer_than,
        unused_s=unused_for,
        used_s=used_within,
        min_nbytes=min_size,
        max_nbytes=max_size,
        pinned=pinned,
    )
    ids = [hex_start(start, "id") for start in prefixes]
    if ids and select != Select(ns=select.ns):
        raise click.UsageError("ids and a selection are both given; give one of them")
    with ExitStack() as undo:
        places = []
        for role, at in (("SRC", source), ("DST", destination)):
            places.append(_open(at, role, {n[4:]: v for n, v in given.items() if n.startswith(role.lower())}))
            undo.callback(places[-1].close)
        if places[0].identity() == places[1].identity():
            raise ConfigError(f"SRC and DST are the same: {places[0].name}; name two places")
        copier, error = _copy(places, select, ids, any_layout, not no_ttl, make_room, rate, dry_run)
    _show(copier, (places[0].name, places[1].name), dry_run, as_json)
    if error is not None:
        raise _ended(error, copier)
    _check(copier)


def _open(at: str, role: str, given: dict[str, str | None]) -> ServerPlace | RedisPlace:
    """Return a place.

    Raises:
        ConfigError: it has no form of one, or a file is not usable or has no effect.
        UnavailableError, RefusedError: nobody answers there, or does not let us in.
    """
    files = {name: Path(value).expanduser().absolute() for name, value in given.items() if value and name in _FILES}
    scheme = at.partition("://")[0] if "://" in at else ""
    if scheme in _REDIS:
        return _open_redis(at, role, files, given["redis_prefix"])
    for name in ("password_file", "redis_prefix"):
        if given[name]:
            raise ConfigError(
                f"--{role.lower()}-{name.replace('_', '-')} is for a Redis, and {role} is {at!r}; leave it out"
            )
    from tierkv.cli.places import ServerPlace
    from tierkv.transport import parse_address

    if not at:
        raise ConfigError(f"{role} is empty; write a server's socket or address, or a Redis URL")
    if scheme and scheme not in ("unix", "tkv", "tkvs"):
        raise ConfigError(
            f"{role}={at!r} is not possible; write a server's socket, unix:///path, tkvs://host:port, or a Redis URL: "
            f"redis://host:port/db, rediss://..., redis+unix:///path"
        )
    address = at if scheme else f"unix://{Path(at).expanduser().absolute()}"
    try:
        return ServerPlace(parse_address(address, **files), role)
    except ConfigError as error:
        raise ConfigError(f"{role}: {error}") from None


def _open_redis(url: str, role: str, files: dict[str, Path], prefix: str | None) -> RedisPlace:
    from tierkv.cli.places import RedisPlace
    from tierkv.config import check_shared_url
    from tierkv.server_config import SharedConfig

    if "token_file" in files:
        raise ConfigError(f"--{role.lower()}-token-file is for a server, and {role} is a Redis; leave it out")
    url = url.removeprefix("redis+") if url.startswith("redis+unix://") else url
    try:
        config = msgspec.structs.replace(SharedConfig(url=check_shared_url(url) or url), **files)
        if prefix is not None:
            config = msgspec.structs.replace(config, prefix=prefix)
        return RedisPlace(config, role)
    except ConfigError as error:
        raise ConfigError(f"{role}: {error}") from None


def _copy(
    places: list[Any],
    select: Select,
    ids: list[str],
    any_layout: bool,
    keep_ttl: bool,
    make_room: bool,
    rate: int,
    dry_run: bool,
) -> tuple[Copier, TierKVError | None]:
    """Copy, and return what came of it, and what ended it before its end."""
    from tierkv.cli.import_ import check_fits
    from tierkv.copying import Copier

    def fits(space: Any, known: Any) -> None:
        if not any_layout:
            check_fits(space, known, "these chunks")

    copier = Copier(places[0], places[1], fits, keep_ttl=keep_ttl)
    copier.plan(select, ids)
    if dry_run:
        copier.count_planned()
        return copier, None
    if not make_room:
        copier.check_room()
    shown = sys.stderr.isatty() and not flag("quiet")
    bar: Any = nullcontext()
    if shown:
        bar = click.progressbar(length=len(copier.todo), label="Copying", file=sys.stderr)
    with bar as progress:
        try:
            for num in copier.run(rate):
                if progress is not None:
                    progress.update(num)
        except (UnavailableError, RefusedError) as error:
            return copier, error
    return copier, None


def _ended(error: TierKVError, copier: Copier) -> TierKVError:
    """Return the error that says how far a copy came, and how it goes on."""
    sentence = (
        f"the copy ended after {copier.num_done:,} of {copier.num_total:,} chunks: {error}; give the same command "
        f"again, and it goes on from there"
    )
    return UnavailableError(sentence) if isinstance(error, UnavailableError) else RefusedError(sentence)


def _show(copier: Copier, names: tuple[str, str], dry_run: bool, as_json: bool) -> None:
    tallies = [t for t in copier.tallies.values() if t.num_chunks or t.num_host]
    fields = ("num_chunks", "num_copied", "num_there", "num_bad", "num_gone", "num_refused", "num_host", "nbytes")
    total = {name: sum(getattr(t, name) for t in tallies) for name in fields}
    if as_json:
        about = {"dry_run": dry_run, "source": names[0], "destination": names[1]}
        print_json(about | total | {"namespaces": [msgspec.to_builtins(t) for t in tallies]})
        return
    if not tallies:
        return
    from tierkv.cli import render

    rows = [
        (
            f"{t.namespace[: render.NS_DIGITS]} {render.model_name(t.model)}",
            *(render.count(getattr(t, name)) for name in fields[:-2]),
            render.size(t.nbytes),
        )
        for t in tallies
    ]
    columns = (
        "namespace",
        ">chunks",
        ">to copy" if dry_run else ">copied",
        ">there",
        ">bad",
        ">gone",
        ">refused",
        ">bytes",
    )
    console = render.console()
    console.print(render.table(columns, rows, flexible="namespace"))
    if total["num_host"]:
        chunks = render.plural(total["num_host"], "chunk")
        console.print(f"{chunks} more in engines' host pools alone, which are not copied")


def _check(copier: Copier) -> None:
    """See that something fitted, and all of it is at the destination now.

    Raises:
        NothingMatchedError, RefusedError, IncompleteError: it is not so.
    """
    tallies = list(copier.tallies.values())
    if not copier.num_total:
        raise NothingMatchedError("nothing that fits is below the host pools at SRC; 'tierkv ls' lists what is stored")
    refused = [t for t in tallies if t.num_refused]
    if refused:
        num = sum(t.num_refused for t in refused)
        raise RefusedError(f"{num:,} chunks were refused: " + "; ".join(dict.fromkeys(t.reason for t in refused)))
    num_bad = sum(t.num_bad for t in tallies)
    if num_bad:
        raise IncompleteError(f"{num_bad:,} chunks are damaged at SRC and were not copied; see 'tierkv verify'")
