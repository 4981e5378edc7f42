"""The command line: ``tierkv``. Start-up is what people feel, so a command's module is imported when it is used.

Exit codes: 0 done, 1 nothing matched, 2 bad usage, 3 the server is not reachable, 4 refused (or not done in full).
Every fault is one sentence on standard error; ``TIERKV_DEBUG=1`` shows the traceback too.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from tierkv import __version__
from tierkv.errors import ConfigError, NotFoundError, RefusedError, TierKVError, UnavailableError

EXIT_OK, EXIT_NOTHING, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_REFUSED = 0, 1, 2, 3, 4
EXIT_INTERRUPTED = 130

#: The verbs and what the listing says of them: known without importing any.
VERBS = {
    "bench": "Measure how fast a running server stores, matches and fetches.",
    "compact": "Give disk space that records left behind back to the file system.",
    "config": "Check, show and explain the store server's configuration.",
    "copy": "Copy prefixes to another server or Redis.",
    "doctor": "Check what an engine and its cache stand on, and say what to change.",
    "du": "Sum up bytes by namespace, tenant, depth in the prompt or age.",
    "events": "Follow stores, fetches and evictions.",
    "evict": "Remove a prefix, a prompt, what is old, or a namespace from the tiers.",
    "export": "Write stored prefixes to a safetensors file.",
    "import": "Store the prefixes in a file that export wrote.",
    "ls": "List the stored prefixes.",
    "match": "Show how much of a prompt is stored, and where.",
    "ns": "List the namespaces: models, layouts, bytes.",
    "pin": "Keep a prefix, whatever needs its room, for a time.",
    "report": "Write a page that helps to size the tiers.",
    "session": "List, release or prefetch the sessions that requests name.",
    "serve": "Run a store server in the foreground.",
    "show": "Show a stored prefix chunk by chunk.",
    "slow": "Show operations that were slow, or failed.",
    "stat": "Show the server, its tiers and its engines.",
    "top": "Watch what the tiers are doing.",
    "tree": "Draw the stored prefixes as a tree.",
    "ttl": "Let a prefix expire at a time of its own.",
    "unpin": "Take pins off a prefix.",
    "verify": "Read back what is stored and check it.",
    "warm": "Bring a prefix from the shared tier to this node's disk.",
}
_MODULES = {"import": "import_"}  # Python's own word
_EPILOG = """Exit codes: 0 done, 1 nothing matched, 2 bad usage, 3 the server is not reachable, 4 refused or incomplete.

TIERKV_SERVER names the server's socket for every verb but serve and config, TIERKV_DEBUG=1 shows tracebacks."""


_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class NothingMatchedError(TierKVError):
    """The selection fits nothing that is stored."""


class IncompleteError(TierKVError):
    """Done in part: a tier or an engine could not be reached."""


class LazyGroup(click.Group):
    """A group whose commands are in modules of this package, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"tierkv.cli.{_MODULES.get(cmd_name, cmd_name)}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, VERBS[name]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; what click would treat in its own way leaves as :class:`_Left`."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except (BrokenPipeError, KeyboardInterrupt) as error:
            raise _Left(error) from None
        except (NothingMatchedError, NotFoundError) as error:
            if ctx.meta.get("tierkv.quiet"):
                raise _Left(error) from None
            raise


class _Left(Exception):
    """Carries an exception past click's own handling."""


@click.group(cls=LazyGroup, epilog=_EPILOG, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="tierkv", message="%(prog)s %(version)s")
def cli() -> None:
    """TierKV keeps an LLM engine's KV cache alive below the GPU: in host memory, on disk and in a shared Redis."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        result = cli.main(args, prog_name="tierkv", standalone_mode=False)
    except Exception as error:
        if os.environ.get("TIERKV_DEBUG") == "1":
            traceback.print_exc()
        return _report(error)
    return result if isinstance(result, int) else EXIT_OK


def _report(error: Exception) -> int:
    """Say in a sentence what went wrong and return the exit code for it."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    if isinstance(error, _Left):
        return _left(error.__cause__ or error.args[0])
    if isinstance(error, click.Abort):
        return EXIT_INTERRUPTED
    click.echo(f"tierkv: {_sentence(error)}", err=True)
    return _exit_code(error)


def _left(reason: BaseException) -> int:
    if isinstance(reason, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to say at exit
        return EXIT_OK
    return EXIT_NOTHING if isinstance(reason, TierKVError) else EXIT_INTERRUPTED


def _sentence(error: Exception) -> str:
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "tierkv"
        message = " ".join(error.format_message().split())
        return f"{message[:1].lower()}{message[1:].rstrip('.')}; see '{path} --help'"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, TierKVError):
        return str(error)
    return f"failed in an unforeseen way ({type(error).__name__}: {error}); TIERKV_DEBUG=1 shows where"


def _exit_code(error: Exception) -> int:
    if isinstance(error, NothingMatchedError | NotFoundError):
        return EXIT_NOTHING
    if isinstance(error, UnavailableError):
        return EXIT_UNREACHABLE
    if isinstance(error, ConfigError | click.UsageError):
        return EXIT_USAGE
    if isinstance(error, RefusedError | IncompleteError):
        return EXIT_REFUSED
    return EXIT_REFUSED
