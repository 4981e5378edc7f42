"""``tierkv doctor``: looks at everything that an engine and its cache stand on, and says what to change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tierkv.cli import EXIT_OK, EXIT_REFUSED
from tierkv.cli.options import connect, json_option, namespaces, print_json, server_option
from tierkv.errors import ConfigError, TierKVError, UnavailableError
from tierkv.selection import Select

if TYPE_CHECKING:
    from tierkv.config import EngineConfig
    from tierkv.doctor import Finding
    from tierkv.server_config import ServerConfig

_EXAMPLES = """\b
Examples:
  tierkv doctor
  tierkv doctor --engine '{"disk_dir": "/nvme/tierkv", "host_bytes": "64GiB"}' --speed
  tierkv doctor --config /etc/tierkv/tierkv.toml
  tierkv doctor --json | jq '.findings[] | select(.level == "fail")'"""
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


@click.command("doctor", epilog=_EXAMPLES)
@click.option("--engine", metavar="JSON", help="The engine's kv_connector_extra_config, or a FILE with it.")
@click.option("--config", "config_file", metavar="FILE", help="The server's configuration file.")
@click.option("--disk", metavar="DIR", help="The disk tier's directory [default: what the others name].")
@click.option("--redis", metavar="URL", help="The shared tier [default: what the others name].")
@click.option("--speed", is_flag=True, help="Measure the disk too: writes and reads 256 MiB there.")
@json_option
@server_option
def command(
    engine: str | None,
    config_file: str | None,
    disk: str | None,
    redis: str | None,
    speed: bool,
    as_json: bool,
    server: str | None,
) -> int:
    """Check this machine, its packages, the server that runs, its disk and its Redis, and say what to change.

    Also says why engines of one model that should share do not: what differs in their namespaces. Looks only; --speed
    writes a file of its own and deletes it. Exit code 0 where nothing fails (warnings are fine), 4 otherwise.
    """
    findings = []
    for finding in _findings(engine, config_file, disk, redis, speed, server):
        findings.append(finding)
        if not as_json:
            _print(finding)
    levels = [finding.level for finding in findings]
    if as_json:
        print_json({"findings": [msgspec.to_builtins(finding) for finding in findings]})
    else:
        counts = f"{levels.count('fail')} failed, {levels.count('warn')} warnings, {levels.count('ok')} fine"
        from tierkv.cli import render

        render.console().print(f"{counts}, {levels.count('skip')} not looked at")
    return EXIT_REFUSED if "fail" in levels else EXIT_OK


def _findings(
    engine: str | None, config_file: str | None, disk: str | None, redis: str | None, speed: bool, server: str | None
) -> Iterator[Finding]:
    from tierkv.doctor import fail, machine, ok, software

    yield from software.check()
    engine_config = server_config = None
    if engine is not None:
        try:
            engine_config = read_engine(engine)
            yield ok("engine's options", engine_config.describe())
        except ConfigError as error:
            yield fail("engine's options", str(error), "mend that: the engine would not start")
    if config_file is not None:
        server_config, mistakes = _read_server(config_file)
        yield from mistakes
    yield from machine.check(engine_config.host_bytes if engine_config else None)
    stat, found = _running(server)
    yield from found
    yield from _disk(disk, engine_config, server_config, stat, speed)
    yield from _shared(redis, engine_config, server_config)
    if stat is not None:
        yield from _sharing(server)


def read_engine(text: str) -> EngineConfig:
    """Return the configuration of an engine in ``text``: its options as JSON, or the name of a file with them.

    Both ``kv_connector_extra_config`` and the whole ``kv_transfer_config`` around it are taken.

    Raises:
        ConfigError: it cannot be read, or an option is impossible.
    """
    from tierkv.config import EngineConfig

    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).expanduser().read_text()
        except OSError as error:
            raise ConfigError(f"engine={text!r} is neither JSON nor a file ({error.strerror})") from None
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the engine's options are not JSON ({error})") from None
    if isinstance(options, dict) and "kv_connector" in options:
        options = options.get("kv_connector_extra_config") or {}
    if not isinstance(options, dict):
        raise ConfigError('the engine\'s options are no JSON object; write {"host_bytes": "8GiB", ...}')
    return EngineConfig.parse(options)


def _read_server(file: str) -> tuple[ServerConfig | None, list[Finding]]:
    from tierkv.cli.config import environment
    from tierkv.doctor import fail, ok
    from tierkv.toml_config import BadConfigError, load

    try:
        config = load(Path(file), environment(), files=True)
    except BadConfigError as error:
        mend = "mend that: the server would not start"
        return None, [fail("server's configuration", f"{file}: {mistake}", mend) for mistake in error.mistakes]
    except TierKVError as error:
        return None, [fail("server's configuration", str(error), "name its file with --config")]
    return config, [ok("server's configuration", f"{file} is fine: {config.describe()}")]


def _running(server: str | None) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Return what the server that runs says of itself; None, with the reason, where none does."""
    from tierkv.doctor import fail, skip
    from tierkv.doctor.server import check

    try:
        with connect(server) as client:
            stat: dict[str, Any] = client.ask("TKV.STAT")
    except UnavailableError as error:
        if server is None:
            return None, [skip("server", "none of yours runs on this machine (engines start one where server='auto')")]
        return None, [fail("server", str(error), "start it, or name another with --server")]
    except TierKVError as error:
        return None, [fail("server", str(error), "see 'tierkv stat'")]
    return stat, list(check(stat))


def _disk(
    disk: str | None,
    engine: EngineConfig | None,
    config: ServerConfig | None,
    stat: dict[str, Any] | None,
    speed: bool,
) -> Iterator[Finding]:
    from tierkv.config import DEFAULT_DISK_BYTES, default_disk_dir
    from tierkv.doctor import skip
    from tierkv.doctor.disk import check

    budget, reserve = DEFAULT_DISK_BYTES, 0
    directory = default_disk_dir()
    if config is not None:
        directory, budget, reserve = config.disk.dir, config.disk.bytes, config.disk.reserve_bytes
    elif engine is not None and engine.server == "auto":
        directory, budget = engine.disk_dir, engine.disk_bytes
    elif engine is not None and disk is None:
        yield skip("disk", f"server={engine.server!r}: the disk is another machine's or nobody's")
        return
    elif stat is not None:
        budget = next((tier["budget"] for tier in stat["tiers"] if tier["name"] == "disk"), budget)
        directory = Path(stat["server"]["disk_dir"])
    yield from check(Path(disk).expanduser() if disk else directory, budget, reserve, speed=speed)


def _shared(redis: str | None, engine: EngineConfig | None, config: ServerConfig | None) -> Iterator[Finding]:
    from tierkv.config import check_shared_url
    from tierkv.doctor import fail, skip
    from tierkv.doctor.shared import check
    from tierkv.server_config import SharedConfig

    if config is not None and config.shared is not None and redis is None:
        yield from check(config.shared)
        return
    try:
        url = check_shared_url(redis or (engine.shared_url if engine else None))
    except ConfigError as error:
        yield fail("shared", str(error), "mend the URL")
        return
    if url is None:
        yield skip("shared", "no Redis is named; give --redis URL, --config FILE or --engine JSON")
        return
    yield from check(SharedConfig(url=url))


def _sharing(server: str | None) -> Iterator[Finding]:
    from tierkv.doctor import skip
    from tierkv.doctor.sharing import check

    try:
        with connect(server) as client:
            known = namespaces(client, "")
            rows = client.ask("TKV.USAGE", Select())
    except TierKVError as error:
        yield skip("sharing", f"the namespaces could not be read: {error}")
        return
    rows = rows["rows"] if isinstance(rows, dict) else rows
    tenants: dict[str, set[str]] = {}
    for row in rows:
        tenants.setdefault(row["namespace"], set()).add(row["tenant"])
    yield from check(known, {ns: len(names) for ns, names in tenants.items()})


def _print(finding: Finding) -> None:
    from rich.text import Text

    from tierkv.cli import render

    console = render.console()
    level = Text(f"{finding.level:<4}", style=_COLOURS[finding.level])
    console.print(level + Text(f"  {finding.about:<22} {render.clean(finding.found)}"), soft_wrap=True)
    if finding.advice:
        console.print(f"{'':<29}-> {render.clean(finding.advice)}", soft_wrap=True)
