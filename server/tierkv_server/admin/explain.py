"""What a request that does not fit its struct has wrong, in a sentence that says what would be right."""

from __future__ import annotations

import re

import msgspec
from msgspec.inspect import ListType, LiteralType, StructType, Type, type_info

#: Patterns of :mod:`tierkv_server.admin.schema`, in words.
_PATTERNS = {
    "^[0-9a-f]*$": "hexadecimal digits, as 'tierkv ls' and 'tierkv ns' show them",
    "^[0-9a-f]{32}$": "32 hexadecimal digits",
    "^[0-9a-f]{64}$": "64 hexadecimal digits",
    "^[!-~]+$": "printable characters without spaces",
}
_PATTERN = re.compile(r"Expected `str` matching regex '(?P<pattern>.*)' - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`")
_ENUM = re.compile(r"Invalid enum value (?P<value>.*?)(?: - at `\$\.(?P<path>[^`]*)`)?", re.DOTALL)


def explain(error: Exception, takes: type[msgspec.Struct]) -> str:
    """Return what is wrong with what was to become a ``takes``; of a word that is none of several, those."""
    pattern = _PATTERN.fullmatch(str(error))
    if pattern is not None and pattern["pattern"] in _PATTERNS:
        what = f"a name in $.{pattern['path']}" if pattern["key"] else f"$.{pattern['path']}"
        return f"{what} has to be {_PATTERNS[pattern['pattern']]}"
    found = _ENUM.fullmatch(str(error))
    path = (found["path"] or "") if found else ""
    words = _words(type_info(takes), path.split(".")) if path else []
    if found is None or not words:
        return str(error)
    return f"{found['value']} is not possible for $.{path}; it is one of: {', '.join(words)}"


def _words(kind: Type, path: list[str]) -> list[str]:
    """Return the words that are possible at a path within a type; nothing where that is not a choice of words."""
    for step in path:
        name = step.split("[", 1)[0]
        fields = {field.encode_name: field.type for field in kind.fields} if isinstance(kind, StructType) else {}
        if name not in fields:
            return []
        kind = fields[name]
        if isinstance(kind, ListType):
            kind = kind.item_type
    return [str(value) for value in kind.values] if isinstance(kind, LiteralType) else []
