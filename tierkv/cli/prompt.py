"""A prompt given as token ids: reading it, and the keys of its chunks in each namespace."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from tierkv.errors import ConfigError
from tierkv.keys import chain_keys, root_key
from tierkv.layout import Namespace

_MAX_TOKEN = (1 << 32) - 1


class Prompt(NamedTuple):
    """A prompt: its token ids, and the salt of its tenant (empty: none)."""

    tokens: list[int]
    salt: bytes

    def keys(self, namespaces: Mapping[str, Namespace]) -> dict[str, list[str]]:
        """Return the hex keys of the prompt's whole chunks in each namespace, by the namespace's hex id."""
        found = {}
        for ns, namespace in namespaces.items():
            try:
                identity = bytes.fromhex(namespace.identity)
            except ValueError:
                continue  # described by something that is not TierKV: no key of ours is in there
            root = root_key(identity, b"", self.salt)
            found[ns] = [key.hex() for key in chain_keys(root, self.tokens, namespace.layout.chunk_tokens)]
        return found


def read_prompt(tokens: str | None, tokens_file: str | None, salt: str | None, salt_file: str | None) -> Prompt | None:
    """Return the prompt that the options give, None for none.

    Raises:
        click.UsageError: options contradict each other.
        ConfigError: a file cannot be read, or what stands there is not token ids.
    """
    if tokens is not None and tokens_file is not None:
        raise click.UsageError("--tokens and --tokens-file are both given; give one of them")
    if salt is not None and salt_file is not None:
        raise click.UsageError("--salt and --salt-file are both given; give one of them")
    if tokens is None and tokens_file is None:
        if salt is not None or salt_file is not None:
            raise click.UsageError("a salt is given without a prompt; give --tokens or --tokens-file too")
        return None
    text = tokens if tokens is not None else _read(tokens_file or "", "tokens_file").decode("utf-8", "replace")
    if salt_file is not None:
        salt_bytes = _read(salt_file, "salt_file").removesuffix(b"\n").removesuffix(b"\r")
    else:
        salt_bytes = (salt or "").encode("utf-8", "surrogateescape")
    return Prompt(parse_tokens(text), salt_bytes)


def parse_tokens(text: str) -> list[int]:
    """Return the token ids in ``text``: a JSON list, or numbers between spaces or commas.

    Raises:
        ConfigError: there are none, or something there is not a token id.

    >>> parse_tokens("1, 2 3")
    [1, 2, 3]
    """
    text = text.strip()
    tokens = _json_list(text) if text.startswith("[") else text.replace(",", " ").split()
    if not tokens:
        raise ConfigError("there are no token ids; write them as '1 2 3', '1,2,3' or a JSON list")
    return [_token(token) for token in tokens]


def _json_list(text: str) -> Sequence[object]:
    try:
        tokens = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the token ids start like a JSON list but are none ({error}); write [1, 2, 3]") from None
    assert isinstance(tokens, list)
    return tokens


def _token(value: object) -> int:
    number = -1
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and value.isascii() and value.isdigit():
        number = int(value[:20])
    if not 0 <= number <= _MAX_TOKEN:
        raise ConfigError(f"{value!r} is not a token id; ids are whole numbers from 0 to {_MAX_TOKEN}")
    return number


def _read(name: str, option: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{option}={name!r} cannot be read: {error.strerror}; name a file that you can read"
        ) from None
