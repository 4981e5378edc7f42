"""Opening what a disk tier's directory holds. What may be torn starts empty; what is not ours is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import lmdb

from tierkv.errors import ConfigError
from tierkv.tiers.disk_mark import CLEAN, NotOursError, check_ours, delete_files, read_mark
from tierkv.tiers.environment import Environment

logger = logging.getLogger("tierkv")

_NS_NAME = re.compile(r"[0-9a-f]{32}")


def open_all(
    path: Path, open_one: Callable[[Path], Environment | None], close_one: Callable[[Environment], None]
) -> list[Environment]:
    """Open every environment below ``path / "ns"``; where one fails, those that were opened are closed.

    Raises:
        ConfigError: something there is not ours, or cannot be opened.
    """
    root = directory = path / "ns"
    opened: list[Environment] = []
    try:
        directories = [d for d in sorted(root.iterdir()) if _NS_NAME.fullmatch(d.name) and d.is_dir()]
        for directory in directories:
            check_ours(directory)
        for directory in directories:
            if (env := open_one(directory)) is not None:
                opened.append(env)
        return opened
    except NotOursError as error:
        problem = (
            f"disk_dir={path} holds another version's database in {directory} ({error}), which is left as it is; "
            "set disk_dir to another directory, or remove that one"
        )
    except (lmdb.Error, OSError) as error:
        problem = (
            f"disk_dir={path} holds a database in {directory} that cannot be opened ({error}); "
            "make it readable and writable for this user, or set disk_dir to another directory"
        )
    for env in opened:
        close_one(env)
    raise ConfigError(problem)


def open_environment(directory: Path, map_size: int, boot_id: str) -> Environment | None:
    """Open an environment with its index. One that may be torn, or is damaged, is deleted instead: None.

    Raises:
        lmdb.Error, OSError: it cannot be opened.
        NotOursError: it is of another format.
    """
    mark = read_mark(directory)
    if mark is None:
        return None
    if mark.boot not in (CLEAN, boot_id):
        logger.warning("The disk tier starts empty in %s: the machine crashed while it was open.", directory)
        delete_files(directory)
        return None
    if not (directory / "data.mdb").exists():
        delete_files(directory)
        return None
    try:
        return _load(directory, map_size, boot_id)
    except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.NotFoundError) as error:
        logger.warning("The disk tier starts empty in %s: %s.", directory, error)
        delete_files(directory)
        return None


def _load(directory: Path, map_size: int, boot_id: str) -> Environment:
    env = Environment(directory, map_size, boot_id)
    try:
        env.load()
    except BaseException:
        env.close(clean=False)
        raise
    return env
