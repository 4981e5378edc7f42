"""The manual page: in step with the parser, and roff that formatters take."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tierkv.cli import cli
from tierkv.cli.manual import ENVIRONMENT, EXIT_CODES, escape, manual

PAGE = Path(__file__).parents[2] / "docs" / "man" / "tierkv.1"


def _commands(group: click.Group) -> Iterator[click.Command]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command)
        else:
            yield command


def test_the_page_is_what_the_parser_says() -> None:
    assert PAGE.read_text() == manual(), "run: python -m tierkv.cli.manual > docs/man/tierkv.1"


def test_it_names_every_command_option_and_variable() -> None:
    page = manual()
    variables = {name for name, _ in ENVIRONMENT}
    for command in _commands(cli):
        assert f"\n.SS {escape(command.name or '')}" in page or f" {escape(command.name or '')}\n" in page
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                for option in (*parameter.opts, *parameter.secondary_opts):
                    assert escape(option) in page, (command.name, option)
                if parameter.envvar:
                    assert parameter.envvar in variables, parameter.envvar
    for code, _ in EXIT_CODES:
        assert f"\\fB{code}\\fR" in page


def test_text_is_no_request() -> None:
    assert escape(".B x\\y 'z' a-b") == "\\&.B x\\ey \\(aqz\\(aq a\\-b"
    requests = {line.split()[0] for line in manual().splitlines() if line.startswith(".")}
    assert requests <= {'.\\"', ".TH", ".SH", ".SS", ".PP", ".TP", ".B", ".I", ".nf", ".fi", ".RS", ".RE"}
    assert not [line for line in manual().splitlines() if line.startswith("'") or line != line.rstrip()]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_takes_it() -> None:
    command = ["groff", "-man", "-Tutf8", "-ww", "-rLL=90n", "-P-c"]
    done = subprocess.run(command, input=manual(), capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    shown = re.sub(r".\x08", "", done.stdout)
    assert "tierkv ls --unused-for 7d --min-size 1GiB" in shown and "EXIT STATUS" in shown
    broken = manual().replace(".SH FILES", ".nope FILES")
    done = subprocess.run(command, input=broken, capture_output=True, text=True, timeout=60, check=False)
    assert "nope" in done.stderr, "it would say so"


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_mandoc_takes_it() -> None:
    command = ["mandoc", "-T", "lint", "-W", "error"]
    done = subprocess.run(command, input=manual(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
