"""The manual page of the command line, in roff, made of the parser: ``python -m tierkv.cli.manual``.

``docs/man/tierkv.1`` is what this prints; a test holds the two against each other.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import click

from tierkv import __version__
from tierkv.cli import cli

#: Options that most verbs have, described once.
COMMON = (
    "server",
    "token_file",
    "ca_file",
    "cert_file",
    "key_file",
    "timeout",
    "as_json",
    "quiet",
    "no_color",
)
EXIT_CODES = (
    ("0", "Done. Also where a reader closes the pipe early."),
    ("1", "Nothing matched."),
    ("2", "Bad usage: an unknown option, an impossible value, a file that cannot be read."),
    ("3", "No server answers at the address."),
    ("4", "Refused, or done in part; verify: something is damaged."),
    ("130", "Ctrl-C."),
)
ENVIRONMENT = (
    ("TIERKV_SERVER", "The server to ask, as --server names it."),
    ("TIERKV_TOKEN_FILE", "As --token-file, for servers that need it."),
    ("TIERKV_CA_FILE", "As --ca-file."),
    ("TIERKV_CERT_FILE", "As --cert-file."),
    ("TIERKV_KEY_FILE", "As --key-file."),
    ("TIERKV_SHARED_URL", "serve, config: the shared tier's URL, where no password is to stand in the process list."),
    ("TIERKV_DEBUG", "1: faults show their traceback."),
    ("NO_COLOR", "No colours, whatever its value."),
    ("XDG_CACHE_HOME", "The user's cache folder; by default ~/.cache."),
)
FILES = (
    ("~/.cache/tierkv/", "Default directory of the disk tier; its lock elects the one server that owns it."),
    ("~/.cache/tierkv/tierkv.sock", "Unix socket of the server of that directory, mode 0600."),
    ("~/.cache/tierkv/server.log", "Log of a server that an engine has started; the one before is server.log.1."),
)
_RANGE = re.compile(r"\s*\[(?:(?P<least>[\d.]+)<=x<=(?P<most>[\d.]+)|x>=(?P<only>[\d.]+))\]")
_SEE_ALSO = "vllm(1), redis-server(1), valkey-server(1)"


def manual() -> str:
    """Return the page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield r".\" Made by python -m tierkv.cli.manual of the parser; do not edit."
    yield f'.TH TIERKV 1 "" "TierKV {__version__}" "TierKV"'
    yield ".SH NAME"
    yield r"tierkv \- show and change what a tiered KV cache stores"
    yield ".SH SYNOPSIS"
    yield r".B tierkv"
    yield r".I COMMAND"
    yield r"[\fIOPTIONS\fR] [\fIARGUMENTS\fR]"
    yield ".SH DESCRIPTION"
    yield from _text(cli.help or "")
    yield ".PP"
    yield from _text(
        "Every command but serve and config asks a running server: the one that --server names, else the one of this "
        "user that runs on this machine. A prefix is a chain of stored chunks from the start of a prompt, named by the "
        "first digits of its last chunk's key."
    )
    yield ".SH COMMANDS"
    for path, command in _commands(cli, ()):
        yield from _command(path, command)
    yield ".SH COMMON OPTIONS"
    yield from _text("Most commands that ask a server have these.")
    for option in _common():
        yield from _option(option)
    yield ".SH EXIT STATUS"
    yield from _table(EXIT_CODES)
    yield ".SH ENVIRONMENT"
    yield from _table(ENVIRONMENT)
    yield ".SH FILES"
    yield from _table(FILES)
    yield ".SH SEE ALSO"
    yield escape(_SEE_ALSO)


def _commands(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def _common() -> list[click.Option]:
    stat = cli.get_command(click.Context(cli), "stat")
    assert stat is not None
    found = {p.name: p for p in stat.params if isinstance(p, click.Option)}
    return [found[name] for name in COMMON]


def _command(path: tuple[str, ...], command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(("tierkv", *path)))
    yield f".SS {escape(' '.join(path))}"
    usage = " ".join(command.collect_usage_pieces(context))
    yield ".PP"
    yield f"\\fBtierkv {escape(' '.join(path))}\\fR {escape(usage)}"
    yield ".PP"
    yield from _text(command.help or "")
    own = [p for p in command.params if isinstance(p, click.Option) and p.name not in COMMON and not p.hidden]
    if any(p.name == "as_json" for p in command.params) and not any(p.name == "server" for p in command.params):
        own += [p for p in command.params if isinstance(p, click.Option) and p.name == "as_json"]
    for option in own:
        yield from _option(option)
    if command.epilog:
        yield from _examples(command.epilog)


def _option(option: click.Option) -> Iterator[str]:
    record = option.get_help_record(click.Context(click.Command("tierkv")))
    assert record is not None, option.name
    names, what = record
    yield ".TP"
    yield f"\\fB{escape(names)}\\fR"
    yield from _text(_RANGE.sub(_range, what))


def _range(found: re.Match[str]) -> str:
    """Return in words what an option's number is bounded by."""
    least, most = found["least"] or found["only"], found["most"]
    return f" (from {least} to {most})" if most else f" (at least {least})"


def _examples(epilog: str) -> Iterator[str]:
    _, *lines = epilog.replace("\b", "").strip().splitlines()
    yield ".PP"
    yield "Examples:"
    yield ".PP"
    yield ".nf"
    yield ".RS"
    for line in lines:
        yield escape(line.strip())
    yield ".RE"
    yield ".fi"


def _table(rows: tuple[tuple[str, str], ...]) -> Iterator[str]:
    for name, what in rows:
        yield ".TP"
        yield f"\\fB{escape(name)}\\fR"
        yield from _text(what)


def _text(text: str) -> Iterator[str]:
    """Yield paragraphs."""
    for i, paragraph in enumerate(text.replace("\b", "").strip().split("\n\n")):
        if i:
            yield ".PP"
        yield escape(" ".join(paragraph.split()))


def escape(text: str) -> str:
    """Return text as roff shows it: nothing in it is a request or a hyphen that may become a dash.

    >>> escape(".x --y 'z'")
    '\\\\&.x \\\\-\\\\-y \\\\(aqz\\\\(aq'
    """
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return f"\\&{text}" if text.startswith(".") else text


if __name__ == "__main__":
    sys.stdout.write(manual())
