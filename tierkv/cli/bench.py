"""``tierkv bench``: measure a running server's tiers."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import click

from tierkv.cli.options import Size, Span, flag, json_option, open_server, print_json, server_address, server_option

TIERS = ("disk", "shared")
OPS = ("store", "match", "fetch")
MAX_CLIENTS = 16
MIN_PAYLOAD, MAX_PAYLOAD = 1 << 10, 64 << 20
MAX_PAYLOADS = 8
MAX_SECONDS = 60.0
_EXAMPLES = """\b
Examples:
  tierkv bench                                  both tiers, chunks of 4 MiB, one client
  tierkv bench --tier disk --clients 4 --payload 256KiB --payload 4MiB
  tierkv bench --size 40GiB --tier disk         more than memory: the disk itself, not its cache
  tierkv bench --json | jq -r '.results[] | [.tier, .op, .gb_s, .p99_s] | @tsv'"""


@click.command("bench", epilog=_EXAMPLES)
@click.option("--tier", "tiers", multiple=True, type=click.Choice(TIERS), help="Only this tier; repeatable.")
@click.option("--op", "ops", multiple=True, type=click.Choice(OPS), help="Only this operation; repeatable.")
@click.option("--payload", "payloads", type=Size(), multiple=True, help="Bytes of a chunk; repeatable [default: 4MiB].")
@click.option(
    "--clients", type=click.IntRange(1, MAX_CLIENTS), default=1, metavar="N", help="Clients at a time [default: 1]."
)
@click.option("--duration", type=Span(), default=3.0, help="How long each figure is measured [default: 3s].")
@click.option(
    "--size",
    type=Size(),
    default=0,
    help="What all clients together have stored at a time [default: 256MiB, or what there is room for].",
)
@click.option("--allow-eviction", is_flag=True, help="Go on without room: tiers evict what others stored.")
@json_option
@server_option
def command(
    tiers: tuple[str, ...],
    ops: tuple[str, ...],
    payloads: tuple[int, ...],
    clients: int,
    duration: float,
    size: int,
    allow_eviction: bool,
    as_json: bool,
    server: str | None,
) -> None:
    """Measure how fast a running server stores, matches and fetches, by tier, as an engine would see it.

    Over its unix socket with shared memory, over TCP with payloads on the connection. What is stored is in a namespace
    of its own and is removed at the end, also after Ctrl-C; what a killed run left is removed by the next. What others
    have stored is not pushed out, unless --allow-eviction. An operation is a command of up to 8 MiB, or a match of a
    client's whole chain. Over TCP it takes the admin's token.
    """
    _check(payloads, duration)
    from tierkv.bench.run import Bench, Plan

    plan = Plan(
        payloads=payloads or (4 << 20,),
        num_clients=clients,
        seconds=duration,
        nbytes=size,
        tiers=tiers,
        ops=[op for op in OPS if op in (ops or OPS)],
        allow_eviction=allow_eviction,
    )
    address = server_address(server)
    with _stoppable(), open_server(server) as admin, _progress() as progress:
        result = Bench(admin, address, plan, progress).run()
    shown = _as_data(result)
    if as_json:
        print_json(shown)
    else:
        _print(shown)
    if not shown["results"]:
        from tierkv.errors import RefusedError

        raise RefusedError(
            "nothing was measured: " + "; ".join(f"{s['tier']}: {s['reason']}" for s in shown["skipped"])
        )


def _check(payloads: tuple[int, ...], duration: float) -> None:
    from tierkv.errors import ConfigError

    for nbytes in payloads:
        if not MIN_PAYLOAD <= nbytes <= MAX_PAYLOAD:
            raise ConfigError(f"--payload {nbytes} is not possible; chunks have 1KiB to 64MiB here")
    if len(payloads) > MAX_PAYLOADS:
        raise ConfigError(f"{len(payloads)} payload sizes are too many; give at most {MAX_PAYLOADS}")
    if duration > MAX_SECONDS:
        raise ConfigError(f"--duration {duration:g}s is too long; give at most {MAX_SECONDS:g}s for each figure")


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end it as Ctrl-C does: what was stored is removed first."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Yield what is told of progress: a bar where standard error is a terminal."""
    if not sys.stderr.isatty() or flag("quiet"):
        yield lambda what, share: None
        return
    total, at = 1000, 0
    with click.progressbar(length=total, label="Measuring", file=sys.stderr, item_show_func=lambda what: what) as bar:

        def tell(what: str, share: float) -> None:
            nonlocal at
            bar.update(int(share * total) - at, what)
            at = int(share * total)

        yield tell


def _as_data(result: Any) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(result)
    digits = {"median_s": 7, "p99_s": 7, "seconds": 4, "ops_s": 2, "gb_s": 4, "client_cpu_s": 3, "server_cpu_s": 2}
    rows = [
        {name: round(v, digits[name]) if name in digits and v is not None else v for name, v in row.items()}
        for row in found.pop("figures")
    ]
    return found | {"results": rows}


def _print(found: dict[str, Any]) -> None:
    from tierkv.cli import render

    console = render.console()
    what = f"{render.plural(found['num_clients'], 'client')}, {render.size(found['nbytes'])} stored at a time"
    console.print(render.clean(f"{found['address']}, {found['transport']}: {what}"), soft_wrap=True)
    rows = [
        (
            row["tier"],
            row["op"],
            render.size(row["payload_nbytes"]),
            f"{row['gb_s']:.2f}" if row["nbytes"] else "-",
            f"{row['ops_s']:,.0f}",
            f"{1e3 * row['median_s']:.2f} ms",
            f"{1e3 * row['p99_s']:.2f} ms",
            f"{row['client_cpu_s'] / row['seconds']:.0%}",
            "-" if row["server_cpu_s"] is None else f"{row['server_cpu_s'] / row['seconds']:.0%}",
        )
        for row in found["results"]
    ]
    columns = ("tier", "what", ">chunk", ">GB/s", ">ops/s", ">median", ">p99", ">CPU clients", ">server")
    console.print(render.table(columns, rows))
    for each in found["skipped"]:
        console.print(render.clean(f"{each['tier']} was not measured: {each['reason']}"), soft_wrap=True)
    for tier, num in found["num_evicted"].items():
        if num:
            console.print(f"{tier} evicted {render.plural(num, 'chunk')} meanwhile")
    if found["num_left"]:
        console.print(f"removed {render.plural(found['num_left'], 'namespace')} that earlier runs had left")
