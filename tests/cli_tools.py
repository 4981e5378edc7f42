"""Running the command line in this process, for tests: exit code, standard output, standard error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence
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


def on_terminal(args: Sequence[str], env: dict[str, str], typed: str = "", asked: str = "?") -> tuple[int, str]:
    """Run ``tierkv`` on a terminal, type ``typed`` when ``asked`` appears, and return its exit code and output."""
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color"}
    environment |= {k: v for k, v in env.items() if v}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tierkv.cli", *args], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown, deadline = "", time.monotonic() + 30
    with contextlib.suppress(OSError):  # the terminal ends with its last user
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                data = os.read(ours, 65536)
                if not data:
                    break
                shown += data.decode()
            if typed and asked in shown:
                os.write(ours, typed.encode())
                typed = ""
    os.close(ours)
    return process.wait(timeout=30), shown
