"""Running the command line in this process, for tests: exit code, standard output, standard error."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

from tierkv.cli import main


class Said(NamedTuple):
    """What a run of the command line came to."""

    code: int
    out: str
    err: str


def tierkv(*args: str | Path | int) -> Said:
    """Run ``tierkv`` here."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(map(str, args)))
    return Said(code, out.getvalue(), err.getvalue())


def as_json(*args: str | Path | int, code: int = 0) -> Any:
    """Run a verb with ``--json``, check its exit code, and return the object."""
    said = tierkv(*args, "--json")
    assert said.code == code, said
    assert said.out.count("\n") == 1, said
    return json.loads(said.out)


def refused(said: Said, code: int, *words: str) -> None:
    """Check the exit code, and that standard error is one sentence with these words."""
    assert said.code == code, said
    assert said.err.startswith("tierkv: ") and said.err.count("\n") == 1, said
    for word in words:
        assert word in said.err, said
