"""Options that several verbs share, and what they mean."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import click
from click.core import ParameterSource

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.admin_client import AdminClient
    from tierkv.cli.prompt import Prompt, PromptOptions
    from tierkv.layout import Namespace
    from tierkv.selection import Select
    from tierkv.transport import Address

    IntParam = click.ParamType[int]
    FloatParam = click.ParamType[float]
else:
    IntParam = FloatParam = click.ParamType  # of older versions it is not generic

F = TypeVar("F", bound=Callable[..., Any])

TIERS = ("host", "disk", "shared")
_HEX = re.compile(r"[0-9a-f]+")


#: Options beside ``--server``: what each names. They reach :func:`connect` by the context, not as arguments.
_FILES = {
    "token_file": "File with the token to show to a server over TCP",
    "ca_file": "Certificates of who signed a tkvs:// server's; by default those that this machine trusts",
    "cert_file": "Your own certificate, where a tkvs:// server asks for one",
    "key_file": "Its key",
}


class Store(Protocol):
    """What answers a verb: a server's client, or the tiers themselves where no server runs."""

    def call(self, *words: bytes | str | int) -> bytes:
        """Send a command and return its reply."""

    def ask(self, command: str, body: Any = None) -> Any:
        """Send a command with a JSON body and return its JSON reply, decoded."""

    def close(self) -> None:
        """Let go of it."""

    def __enter__(self) -> Store: ...

    def __exit__(self, *_: object) -> None: ...


def server_option(function: F) -> F:
    """Add ``--server`` and the options that say how it is reached over TCP, ``--quiet`` and ``--no-color``."""
    function = look_options(function)
    function = click.option(
        "--timeout",
        type=Span(),
        expose_value=False,
        callback=_keep_timeout,
        help="How long an answer may take [default: 60s]; a server that is stopped is noticed sooner.",
    )(function)
    for name, what in reversed(_FILES.items()):
        variable = f"TIERKV_{name.upper()}"
        function = click.option(
            f"--{name.replace('_', '-')}",
            metavar="FILE",
            envvar=variable,
            expose_value=False,
            callback=_keep,
            help=f"{what} [{variable}].",
        )(function)
    return click.option(
        "--server",
        metavar="ADDRESS",
        envvar="TIERKV_SERVER",
        help="Path or unix:///path of its socket, or tkvs://host:port [TIERKV_SERVER; default: yours that runs].",
    )(function)


def look_options(function: F) -> F:
    """Add ``--quiet`` and ``--no-color``."""
    function = click.option(
        "--no-color", is_flag=True, expose_value=False, callback=_keep_flag, help="No colours [also: NO_COLOR]."
    )(function)
    return click.option(
        "--quiet",
        "-q",
        is_flag=True,
        expose_value=False,
        callback=_keep_flag,
        help="Say errors only; see the exit code.",
    )(function)


def _keep_flag(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.meta[f"tierkv.{parameter.name}"] = value


def _keep_timeout(context: click.Context, parameter: click.Parameter, value: float | None) -> None:
    context.meta["tierkv.timeout"] = value


def open_server(server: str | None) -> AdminClient:
    """Return a client of the server that ``--server`` names, which waits for its answers as ``--timeout`` says.

    Raises:
        ConfigError: the name is of another form, or several servers are meant.
        UnavailableError: nobody answers there.
    """
    from tierkv.admin_client import ADMIN_TIMEOUT_S, AdminClient

    timeout_s = click.get_current_context().meta.get("tierkv.timeout")
    return AdminClient(server_address(server), timeout_s or ADMIN_TIMEOUT_S)


def flag(name: str) -> bool:
    """Return whether ``--quiet`` (``"quiet"``) or ``--no-color`` (``"no_color"``) is given."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(f"tierkv.{name}"))


def _keep(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value and parameter.name:
        here = context.get_parameter_source(parameter.name) is not ParameterSource.ENVIRONMENT
        context.meta[f"tierkv.{parameter.name}"] = (Path(value).expanduser().absolute(), here)


def json_option(function: F) -> F:
    """Add ``--json``: one JSON object instead of a table."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(function)


def namespace_option(function: F) -> F:
    """Add ``--namespace``: the start of a namespace's id."""
    return click.option(
        "--namespace", "namespace", metavar="ID", help="Only this namespace: its id, or the start of it."
    )(function)


def tier_option(function: F) -> F:
    """Add ``--tier``, repeatable."""
    return click.option(
        "--tier", "tiers", multiple=True, type=click.Choice(TIERS), help="Only this tier; repeatable [default: all]."
    )(function)


class Size(IntParam):
    """A size in bytes, as people write it."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from tierkv.sizes import parse_size

        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Span(FloatParam):
    """A span of time in seconds, as people write it."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from tierkv.sizes import parse_duration

        if isinstance(value, float):
            return value
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not seconds:
            self.fail(f"{value!r} is no time; write a span such as '30m' or '7d'", param, ctx)
        return seconds


def tenant_option(function: F) -> F:
    """Add ``--tenant``: the start of a tenant's digest."""
    function = click.option(
        "--tenant",
        metavar="ID",
        default="",
        help="Only this tenant: the start of the digest that 'tierkv du --by tenant' shows.",
    )(function)
    return function


def tenant_start(value: str) -> str:
    """Return the start of a tenant's digest that ``--tenant`` gives; empty for none."""
    return hex_start(value, "tenant") if value else ""


def offline_options(function: F) -> F:
    """Add ``--disk`` and ``--redis``: look at a store that no server runs."""
    function = click.option(
        "--redis",
        metavar="URL",
        expose_value=False,
        callback=_keep_text,
        help="Look at a Redis itself; no server is needed.",
    )(function)
    return click.option(
        "--disk",
        metavar="DIR",
        expose_value=False,
        callback=_keep_text,
        help="Look at a disk directory itself; where a server owns it, that server is asked.",
    )(function)


def _keep_text(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    context.meta[f"tierkv.{parameter.name}"] = value


def prompt_options(function: F) -> F:
    """Add the options that give a prompt; the verb takes them as one argument, ``given``."""

    @functools.wraps(function)
    def call(*args: Any, **values: Any) -> Any:
        from tierkv.cli.prompt import PromptOptions

        given = PromptOptions(**{name: values.pop(name) for name in PromptOptions._fields})
        return function(*args, given=given, **values)

    for option in (
        click.option("--salt-file", metavar="FILE", help="Read the salt from FILE (without its last newline)."),
        click.option("--salt", metavar="TEXT", help="The cache_salt that the prompt's tenant sends."),
        click.option("--engine-key-file", metavar="FILE", help="Read the engine's API key from FILE."),
        click.option("--engine", metavar="URL", help="The vLLM server that makes token ids of text or chat."),
        click.option("--tokenizer", metavar="MODEL", help="Directory of the tokenizer [default: of what is stored]."),
        click.option("--chat", metavar="FILE", help="Read chat messages, or a request's body, as JSON; - for stdin."),
        click.option("--text-file", metavar="FILE", help="Read the prompt's text from FILE, or - for standard input."),
        click.option("--text", metavar="TEXT", help="The prompt as text."),
        click.option("--tokens-file", metavar="FILE", help="Read the token ids from FILE, or - for standard input."),
        click.option("--tokens", metavar="IDS", help="The prompt's token ids: '1 2 3', '1,2,3' or a JSON list."),
    ):
        call = option(call)
    return call  # type: ignore[return-value]


def connect(server: str | None) -> Store:
    """Return what ``--server``, or ``--disk`` and ``--redis``, name.

    Raises:
        ConfigError: the name is of another form, or several servers are meant.
        UnavailableError: nobody answers there.
        RefusedError: the directory is another server's, which cannot be found.
    """
    meta = click.get_current_context().meta
    disk, redis = meta.get("tierkv.disk"), meta.get("tierkv.redis")
    if disk is None and redis is None:
        return open_server(server)
    context = click.get_current_context()
    if server is not None and context.get_parameter_source("server") is not ParameterSource.ENVIRONMENT:
        raise click.UsageError("--server and --disk or --redis are both given; give one of them")
    from tierkv.cli.offline import open_offline

    return open_offline(disk, redis)


def server_address(server: str | None) -> Address:
    """Return where ``--server`` and the files beside it say that the server is; else the one of yours that runs.

    Raises:
        ConfigError: it is of another form, or several of yours run.
    """
    from tierkv.transport import parse_address

    if server == "":
        raise ConfigError("server='' is no address; write the path of its socket")
    if server is None:
        from tierkv.cli.discover import find_server

        server = f"unix://{find_server()}"
    elif "://" not in server:
        server = f"unix://{Path(server).expanduser().absolute()}"
    meta = click.get_current_context().meta
    files: dict[str, Path] = {}
    for name in _FILES:
        path, here = meta.get(f"tierkv.{name}", (None, False))
        if path and (here or server.startswith("tkvs://")):  # what the environment says is for servers that need it
            files[name] = path
    return parse_address(server, **files)


def hex_start(value: str, what: str) -> str:
    """Return ``value``, the start of an id, in lower case.

    Raises:
        ConfigError: it is not hexadecimal digits.
    """
    digits = value.strip().lower()
    if not _HEX.fullmatch(digits):
        raise ConfigError(f"{what} {value!r} is not hexadecimal digits; copy it from 'tierkv ls' or 'tierkv stat'")
    return digits


def namespace_start(value: str | None) -> str:
    """Return the start of a namespace's id that ``--namespace`` gives; empty for none."""
    return "" if value is None else hex_start(value, "namespace")


class Named(NamedTuple):
    """The one prefix that a verb is about: an id or a prompt."""

    prefix: str
    prompt: Prompt | None

    def select(self, store: Store, start: str) -> Select:
        """Return the selection of it in the namespaces whose id starts with ``start``.

        Raises:
            NotFoundError: the prompt has no whole chunk in any namespace.
        """
        from tierkv.errors import NotFoundError
        from tierkv.selection import Select

        if self.prompt is None:
            return Select(ns=start, prefix=self.prefix)
        keys = self.prompt.keys(namespaces(store, start))
        if not any(keys.values()):
            raise NotFoundError("the prompt has no whole chunk in any namespace, so nothing of it is stored")
        return Select(ns=start, keys=keys)


def one_prefix(prefix: str | None, given: PromptOptions) -> Named:
    """Return the one prefix that an id or the options of a prompt name.

    Raises:
        click.UsageError: none is named, or two.
        ConfigError: one of them is not readable.
    """
    from tierkv.cli.prompt import read_prompt

    prompt = read_prompt(given)
    if prefix is None and prompt is None:
        raise click.UsageError("no prefix is named; give its id, or a prompt (--tokens, --text, --chat)")
    if prefix is not None and prompt is not None:
        raise click.UsageError("an id and a prompt are both given; give one of them")
    return Named("" if prefix is None else hex_start(prefix, "id"), prompt)


def namespaces(client: Store, start: str) -> Mapping[str, Namespace]:
    """Return the namespaces whose hex id starts with ``start``, by id."""
    import msgspec

    from tierkv.layout import Namespace

    found = msgspec.convert(client.ask("TKV.NS"), dict[str, Namespace])
    return {ns: namespace for ns, namespace in found.items() if ns.startswith(start)}


def print_json(value: object) -> None:
    """Print ``value`` as one line of JSON."""
    click.echo(json.dumps(value))
