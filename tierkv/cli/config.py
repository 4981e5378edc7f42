"""``tierkv config``: check, show and explain the configuration of the store server."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierkv.cli import EXIT_OK, EXIT_USAGE
from tierkv.cli.options import print_json

_EXAMPLES = """\b
Examples:
  tierkv config example > tierkv.toml           a file to start from
  tierkv config check tierkv.toml               every mistake in it
  tierkv config show tierkv.toml --json | jq .disk"""


@click.group("config", epilog=_EXAMPLES)
def command() -> None:
    """Check, show and explain the configuration file of 'tierkv serve --config FILE'."""


@command.command("check", epilog=_EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--no-files", is_flag=True, help="Check the text alone, not the directories, certificates and secrets it names."
)
def check(file: Path, no_files: bool) -> int:
    """Say every mistake in FILE, one a line. Exit code 0 if there is none, 2 if there are some.

    Run it as the server's user, on the server's machine: it looks at the files that the configuration names.
    """
    from tierkv.toml_config import BadConfigError, load

    try:
        config = load(file, environment(), files=not no_files)
    except BadConfigError as error:
        for mistake in error.mistakes:
            click.echo(f"{file}: {mistake}", err=True)
        return EXIT_USAGE
    click.echo(f"{file}: fine. A server would be {config.describe()}")
    return EXIT_OK


@command.command("show", short_help="Print the effective configuration.", epilog=_EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: sizes in bytes, durations in seconds.")
def show(file: Path | None, as_json: bool) -> None:
    """Print the effective configuration: FILE, the environment, and the defaults for the rest. No secrets."""
    from tierkv.toml_config import load, to_data, to_toml

    config = load(file, environment(), files=False)
    if as_json:
        print_json(to_data(config))
    else:
        click.echo(to_toml(config), nl=False)


@command.command("example", short_help="Print a file with every field and its default.", epilog=_EXAMPLES)
def print_example() -> None:
    """Print a configuration file with every field, its default and what it does, to start from."""
    from tierkv.toml_config import example

    click.echo(example(), nl=False)


def environment() -> dict[str, dict[str, str]]:
    """Return what the environment says of the configuration."""
    url = os.environ.get("TIERKV_SHARED_URL")
    return {"shared": {"url": url}} if url else {}
