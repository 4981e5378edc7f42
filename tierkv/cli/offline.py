"""A store that no server runs: a disk directory, a Redis, or both, looked at by this process itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from tierkv.admin_client import AdminClient
from tierkv.cli.discover import running_servers
from tierkv.cli.options import Store
from tierkv.config import check_shared_url, socket_path
from tierkv.errors import ConfigError, RefusedError, UnavailableError
from tierkv.selection import Select
from tierkv.server_config import SharedConfig
from tierkv.tiers.disk_reader import DiskReader, OwnedError
from tierkv.tiers.shared import SharedTier
from tierkv.urls import redact_url
from tierkv_server.lister import Lister, Readable
from tierkv_server.verify import Verifier


def open_offline(disk: str | None, redis: str | None) -> Store:
    """Return the store in a directory, in a Redis, or in both; a server's client where one owns the directory.

    Raises:
        ConfigError: the directory or the URL is not usable.
        RefusedError: a server owns the directory and cannot be found, or a Redis is named beside it.
        UnavailableError: the Redis does not answer.
    """
    tiers: list[DiskReader | SharedTier] = []
    if disk is not None:
        directory = Path(disk).expanduser().absolute()
        try:
            tiers.append(DiskReader(directory))
        except OwnedError as owned:
            if redis is not None:
                raise RefusedError(f"{owned}, which knows its Redis itself; leave out --redis, or stop it") from None
            return _through_server(directory, owned)
    try:
        if redis is not None:
            tiers.append(_open_redis(redis))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return OfflineStore(tiers)


def _through_server(directory: Path, owned: OwnedError) -> AdminClient:
    """Return a client of the server that owns a directory."""
    for socket in dict.fromkeys((socket_path(directory), *running_servers())):
        with contextlib.suppress(UnavailableError, RefusedError):
            client = AdminClient(socket)
            about = client.ask("TKV.STAT")["server"]
            if Path(about["disk_dir"]) == directory or (owned.pid and about["pid"] == owned.pid):
                return client
            client.close()
    raise RefusedError(f"{owned} on a socket that was not found; name it with --server instead of --disk")


def _open_redis(url: str) -> SharedTier:
    tier = SharedTier(SharedConfig(url=check_shared_url(url) or url))
    stat = tier.stat()
    if stat.state == "out":
        tier.close()
        raise UnavailableError(
            f"no Redis answers at {redact_url(url)} ({stat.reason}); check --redis, and that it runs"
        )
    return tier


class OfflineStore:
    """Answers the questions that take no server. What it cannot do is refused."""

    def __init__(self, tiers: Sequence[DiskReader | SharedTier]) -> None:
        self._tiers = tiers
        lister, verifier = Lister(self), Verifier(Lister(self))
        self._table: dict[str, Callable[[Select], Any]] = {
            "TKV.NS": lambda _: {i.hex(): n for i, n in lister.namespaces().items()},
            "TKV.LS": lister.ls,
            "TKV.PAGE": lister.page,
            "TKV.SHOW": lister.show,
            "TKV.TREE": lister.tree,
            "TKV.DU": lister.du,
            "TKV.LOCATE": lister.locate,
            "TKV.VERIFY": verifier.step,
        }
        for tier in tiers:
            for sentence in tier.skipped if isinstance(tier, DiskReader) else ():
                click.echo(f"tierkv: {sentence}", err=True)

    def tiers(self) -> Sequence[Readable]:
        """Return the tiers, nearest first."""
        return self._tiers

    def call(self, *words: bytes | str | int) -> bytes:
        """Refuse: raw commands are a server's."""
        raise RefusedError(f"{words[0]!r} takes a running server; leave out --disk and --redis")

    def ask(self, command: str, body: Any = None) -> Any:
        """Answer a question as a server would."""
        answer = self._table.get(command)
        if answer is None:
            raise RefusedError("this takes a running server; leave out --disk and --redis")
        select = Select() if body is None else body
        if select.repair:
            raise ConfigError("--repair changes the store, which takes a running server; leave out --disk and --redis")
        return msgspec.to_builtins(answer(select))

    def close(self) -> None:
        """Close the tiers."""
        for tier in self._tiers:
            tier.close()

    def __enter__(self) -> OfflineStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
