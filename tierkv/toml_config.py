"""The server's configuration as a TOML file: read with every mistake in it, and written back.

A file's names are those of :mod:`tierkv.server_config`, without ``_s`` at the end of durations. Relative paths start at
the file's directory, ``~`` is the user's home. A mistake is a sentence that begins with the path of its field
(``$.disk.bytes: ...``).
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tierkv.config import check_shared_url, socket_path
from tierkv.errors import ConfigError
from tierkv.server_config import PARTS, DiskConfig, Field, Kind, ListenConfig, Part, ServerConfig, SharedConfig
from tierkv.sizes import format_duration, format_size, parse_duration, parse_size
from tierkv.urls import redact_url

#: A configuration is a few kilobytes; what is larger is another file.
MAX_FILE_NBYTES = 1 << 20
NEVER = "never"
#: Stands in while the rest is looked at, where the URL itself is a mistake.
_NO_URL = ""


class Mistake(NamedTuple):
    """A mistake: the fields it is about (``disk.bytes``), and what is wrong and what to do."""

    fields: tuple[str, ...]
    sentence: str

    def __str__(self) -> str:
        return f"$.{self.fields[0]}: {self.sentence}" if self.fields else self.sentence


class BadConfigError(ConfigError):
    """A configuration with mistakes: all of them, not only the first."""

    def __init__(self, source: str, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = [str(mistake) for mistake in mistakes]
        few = "a mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__(f"{source} has {few}: " + "; ".join(self.mistakes))


def load(path: Path | None, overrides: Mapping[str, Any] | None = None, *, files: bool = True) -> ServerConfig:
    """Return the configuration of a file, checked.

    Args:
        path: the file; None for defaults alone.
        overrides: tables of values, as a file has them, that go before the file's.
        files: check also what the configuration names: directories, certificates, tokens.

    Raises:
        BadConfigError: with every mistake.
    """
    source = str(path) if path else "the configuration"
    table = read_table(path) if path else {}
    config, mistakes = read(merge(table, overrides or {}), path.absolute().parent if path else Path.cwd(), files)
    if mistakes:
        raise BadConfigError(source, mistakes)
    return config


def read_table(path: Path) -> dict[str, Any]:
    """Return what a TOML file says.

    Raises:
        BadConfigError: it cannot be read, or is no TOML.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_NBYTES + 1)
    except OSError as error:
        raise BadConfigError(str(path), [Mistake((), f"the file cannot be read: {error.strerror or error}")]) from None
    return parse_toml(data, str(path))


def parse_toml(data: bytes, source: str) -> dict[str, Any]:
    """Return what the bytes of a TOML file say.

    Raises:
        BadConfigError: they are no TOML.
    """
    try:
        if len(data) <= MAX_FILE_NBYTES:
            return tomllib.loads(data.decode())
        sentence = f"it is longer than {format_size(MAX_FILE_NBYTES)}; name a configuration file"
    except UnicodeDecodeError:
        sentence = "it is no text in UTF-8"
    except RecursionError:
        sentence = "it is no TOML that can be read: nested too deeply"
    except ValueError as error:  # its sentence says the line
        sentence = f"it is no TOML: {error}"
    raise BadConfigError(source, [Mistake((), sentence)])


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables laid over each other.

    >>> merge({"disk": {"bytes": 1, "dir": "a"}}, {"disk": {"bytes": 2}})
    {'disk': {'bytes': 2, 'dir': 'a'}}
    """
    both = dict(below)
    for name, value in above.items():
        under = both.get(name)
        both[name] = merge(under, value) if isinstance(value, Mapping) and isinstance(under, Mapping) else value
    return both


def read(table: Mapping[str, Any], base: Path, files: bool = True) -> tuple[ServerConfig, list[Mistake]]:
    """Return the configuration that tables describe, and what is wrong with it: usable only if that is nothing.

    Args:
        table: as :mod:`tomllib` gives it.
        base: where relative paths start.
        files: check also what the configuration names.
    """
    from tierkv.config_checks import check  # not where a configuration is only passed on

    reader = _Reader(base)
    config = reader.config(table)
    failed = {field for mistake in reader.mistakes for field in mistake.fields}
    more = [m for m in check(config, files=files) if not failed.intersection(m.fields)]
    return config, reader.mistakes + more


class _Reader:
    """Turns tables into structs. A value that is a mistake is noted, and the default stands in for it."""

    def __init__(self, base: Path) -> None:
        self.mistakes: list[Mistake] = []
        self._base = base

    def config(self, table: Mapping[str, Any]) -> ServerConfig:
        top = self._values(ServerConfig, table, "", tuple(PARTS))
        parts: dict[str, Any] = {}
        for name, kind in PARTS.items():
            inner = table.get(name)
            if inner is None and name not in ("disk", "listen", "quota", "sessions"):
                continue
            if inner is not None and not isinstance(inner, Mapping):
                self._wrong(name, f"{_shown(inner)} is no table; write [{name}] on a line of its own")
                inner = {}
            parts[name] = self._values(kind, inner or {}, f"{name}.")
        return self._build(top, parts)

    def _build(self, top: dict[str, Any], parts: dict[str, Any]) -> ServerConfig:
        disk = DiskConfig(**parts.pop("disk"))
        listen = parts.pop("listen")
        listen.setdefault("socket", socket_path(disk.dir))
        shared = parts.pop("shared", None)
        if shared is not None and "url" not in shared:
            if not any("shared.url" in mistake.fields for mistake in self.mistakes):
                self._wrong("shared.url", 'is missing; write url = "redis://host:6379/0", or leave [shared] out')
            shared["url"] = _NO_URL
        made = {name: PARTS[name](**values) for name, values in parts.items()}
        return ServerConfig(
            **top,
            disk=disk,
            listen=ListenConfig(**listen),
            shared=None if shared is None else SharedConfig(**shared),
            **made,  # type: ignore[arg-type]
        )

    def _values(
        self, kind: type[Part], table: Mapping[str, Any], path: str, tables: Sequence[str] = ()
    ) -> dict[str, Any]:
        fields = {field.file_name: field for field in kind.fields()}
        values: dict[str, Any] = {}
        for name, value in table.items():
            field = fields.get(name)
            if field is not None:
                try:
                    values[field.name] = self._value(field, value, f"{path}{name}")
                except ValueError as error:
                    self._wrong(f"{path}{name}", str(error))
            elif name not in tables:
                self._unknown(f"{path}{name}", name, [*fields, *tables])
        return values

    def _unknown(self, path: str, name: str, known: Sequence[str]) -> None:
        near = difflib.get_close_matches(name, known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else "known are " + ", ".join(known)
        self._wrong(path, f"no such field; {fix}")

    def _wrong(self, path: str, sentence: str) -> None:
        self.mistakes.append(Mistake((path,), sentence))

    def _value(self, field: Field, value: Any, path: str) -> Any:
        """Return the value that a file's value means.

        Raises:
            ValueError: it means none; says why.
        """
        kind, about = field.about.kind, field.about
        if kind is Kind.DURATION and field.optional and value == NEVER:
            return None
        if kind is Kind.SIZES:
            return self._sizes(field, value, path)
        if kind is Kind.FLAG:
            return _typed(value, bool, "write true or false")
        if kind in (Kind.SIZE, Kind.DURATION, Kind.COUNT, Kind.MODE):
            return _bounded(field, value, _NUMBERS[kind](value))
        text = _typed(value, str, "write it in quotes")
        if kind is Kind.URL:
            return _url(text)
        if kind is Kind.WORD:
            return type(field.default)(_word(text, about.words))
        if kind in (Kind.DIRECTORY, Kind.SOCKET, Kind.FILE, Kind.SECRET):
            return self._path(text)
        if kind is Kind.ADDRESS:
            return "{}:{}".format(*parse_address(text))
        return text

    def _sizes(self, field: Field, value: Any, path: str) -> dict[str, int]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{_shown(value)} is no table of sizes; write [{path}] and a line for each")
        sizes: dict[str, int] = {}
        for name, item in value.items():
            try:
                sizes[name] = _bounded(field, item, _size(item))
            except ValueError as error:
                self._wrong(f"{path}.{name}", str(error))
        return sizes

    def _path(self, text: str) -> Path:
        if not text or "\0" in text:
            raise ValueError(f"{text!r} is no path")
        try:
            return Path(os.path.normpath(self._base / Path(text).expanduser()))
        except RuntimeError:
            raise ValueError(f"{text!r} names a user who has no home here; write an absolute path") from None


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; an IPv6 address stands in brackets, which stay.

    Raises:
        ValueError: it has another form.
    """
    host, colon, port = text.rpartition(":")
    bare = host.startswith("[") == host.endswith("]") and (host.startswith("[") or ":" not in host)
    if not (colon and host.strip("[]") and bare and host.isprintable() and " " not in host):
        raise ValueError(f"{text!r} is no address; write host:port, such as 127.0.0.1:9109 or [::1]:9109")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"{text!r} has port {port!r}; a port is a number from 1 to 65535")
    return host, int(port)


def _size(value: Any) -> int:
    return parse_size(value)


def _duration(value: Any) -> float:
    try:
        return parse_duration(value)
    except OverflowError:
        raise ValueError("it is no duration from 0 to a hundred years") from None


def _count(value: Any) -> int:
    return int(_typed(value, int, "write a whole number"))


def _mode(value: Any) -> int:
    if (
        isinstance(value, str)
        and value.isascii()
        and value.isdigit()
        and len(value) <= 5
        and set(value) <= set("01234567")
    ):
        return int(value, 8)
    return int(_typed(value, int, 'write 0o600 or "0600"'))


_NUMBERS: dict[Kind, Any] = {Kind.SIZE: _size, Kind.DURATION: _duration, Kind.COUNT: _count, Kind.MODE: _mode}


def _typed(value: Any, kind: type, fix: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{_shown(value)} is not possible; {fix}")
    return value


def _bounded(field: Field, value: Any, number: float) -> Any:
    about = field.about
    if not about.least <= number <= about.most:
        most = f" to {_number(about.kind, about.most)}" if about.most < math.inf else ""
        least = _number(about.kind, about.least)
        raise ValueError(f"{_shown(value)} is not possible; set a {about.kind} from {least}{most}")
    return number


def _number(kind: Kind, number: float) -> str:
    if kind in (Kind.SIZE, Kind.SIZES):
        return format_size(number)
    if kind is Kind.DURATION:
        return format_duration(number)
    return f"0o{int(number):o}" if kind is Kind.MODE else f"{number:g}"


def _word(text: str, words: Sequence[str]) -> str:
    if text in words:
        return text
    near = difflib.get_close_matches(text, words, n=1)
    fix = f"did you mean {near[0]!r}?" if near else "set one of " + ", ".join(words)
    raise ValueError(f"{text!r} is not possible; {fix}")


def _url(text: str) -> str:
    try:
        return check_shared_url(text) or text
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("shared_url=")) from None


def _shown(value: Any) -> str:
    """Return a value for a sentence: short, and without a password that a URL may hold."""
    text = redact_url(value) if isinstance(value, str) else value
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


# -- writing


def to_toml(config: ServerConfig) -> str:
    """Return the effective configuration as a file, without secrets; what is not set is left out."""
    lines = [f"{f.file_name} = {_literal(f, getattr(config, f.name))}" for f in ServerConfig.fields()]
    for part, kind in PARTS.items():
        struct = getattr(config, part)
        if struct is None:
            continue
        tables = []
        lines += ["", f"[{part}]"]
        for field in kind.fields():
            value = getattr(struct, field.name)
            if field.about.kind is Kind.SIZES:
                tables.append((field, value))
            elif (literal := _literal(field, value)) is not None:
                lines.append(f"{field.file_name} = {literal}")
        for field, sizes in tables:
            if sizes:
                lines += ["", f"[{part}.{field.file_name}]"]
                lines += [f"{_quoted(name)} = {_quoted(exact_size(nbytes))}" for name, nbytes in sizes.items()]
    return "\n".join(lines) + "\n"


def to_data(config: ServerConfig) -> dict[str, Any]:
    """Return the effective configuration as data with a file's names, without secrets: sizes in bytes, durations in
    seconds, None for what is not set."""
    data: dict[str, Any] = {part: None if getattr(config, part) is None else {} for part in PARTS}
    for part, field, value in config.values():
        into = data[part.removesuffix(".")] if part else data
        plain = value if value is None or isinstance(value, bool | int | float | dict) else str(value)
        into[field.file_name] = redact_url(value) if field.about.kind is Kind.URL else plain
    return data


def example() -> str:
    """Return a file with every field, its default or an example, and what it does; all but its tables are comments."""
    lines = ['# Configuration of a TierKV store server. Sizes: "8GiB" or bytes; durations: "12h" or seconds.', ""]
    lines += _example_fields(ServerConfig, "")
    for part, kind in PARTS.items():
        optional = part in ("shared", "http")
        lines += [f"# {(kind.__doc__ or '').strip()}", f"{'#' if optional else ''}[{part}]"]
        lines += _example_fields(kind, part)
    return "\n".join(lines).rstrip() + "\n"


def _example_fields(kind: type[Part], part: str) -> Iterator[str]:
    for field in kind.fields():
        about = field.about
        words = f" ({', '.join(about.words)})" if about.words else ""
        what = about.what + words
        sentence = what[:1].upper() + what[1:]  # but for a name in backticks
        yield f"# {sentence.replace('`', '')}."
        if about.kind is Kind.SIZES:
            yield f"#[{part}.{field.file_name}]"
            yield f'#"{"0123456789abcdef" * 2}" = "100GiB"'
        elif about.example:
            yield f"#{field.file_name} = {_quoted(about.example)}"
        else:
            yield f"#{field.file_name} = {_literal(field, field.default)}"
        yield ""


def _literal(field: Field, value: Any) -> str | None:
    """Return a value as TOML, exactly; None where TOML has no word for it."""
    kind = field.about.kind
    if value is None:
        return _quoted(NEVER) if kind is Kind.DURATION else None
    if kind is Kind.SIZE:
        return _quoted(exact_size(value))
    if kind is Kind.DURATION:
        return _quoted(exact_duration(value))
    if kind is Kind.MODE:
        return f"0o{value:o}"
    if kind is Kind.FLAG:
        return str(value).lower()
    if kind is Kind.COUNT:
        return str(value)
    return _quoted(redact_url(value) if kind is Kind.URL else str(value))


def exact_size(nbytes: int) -> str:
    """Return bytes in the largest unit that says them exactly.

    >>> exact_size(20 << 30)
    '20GiB'
    """
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return f"{nbytes}B"


def exact_duration(seconds: float) -> str:
    """Return seconds in the largest unit that says them exactly, to the microsecond.

    >>> exact_duration(604800.0)
    '7d'
    """
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds and seconds % unit_s == 0:
            return f"{int(seconds // unit_s)}{unit}"
    digits = f"{seconds:.6f}".rstrip("0").rstrip(".")
    return f"{digits}s"


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _quoted(text: str) -> str:
    """Return a string as TOML."""
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'
