"""A prompt given on the command line: reading it, and the keys of its chunks in each namespace.

It is given as token ids, as text, or as the messages of a chat. Text becomes token ids as an engine makes them of it:
by the tokenizer of the namespace's model (:mod:`tierkv.cli.tokenize`), or by the engine itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from tierkv.errors import ConfigError
from tierkv.keys import chain_keys, root_key
from tierkv.layout import Namespace

_MAX_TOKEN = (1 << 32) - 1
#: The options of which one gives the prompt.
_KINDS = ("tokens", "tokens_file", "text", "text_file", "chat")


class PromptOptions(NamedTuple):
    """The values of the options that give a prompt, as :func:`tierkv.cli.options.prompt_options` adds them."""

    tokens: str | None = None
    tokens_file: str | None = None
    text: str | None = None
    text_file: str | None = None
    chat: str | None = None
    tokenizer: str | None = None
    engine: str | None = None
    engine_key_file: str | None = None
    salt: str | None = None
    salt_file: str | None = None


class Prompt:
    """A prompt: its token ids for an engine of a namespace, and the salt of its tenant (empty: none).

    Args:
        salt: the tenant's.
        tokenize: returns the token ids for the namespace's engines; asked once a model name.
        num_given: how many tokens there are, where token ids were given; None where it depends on the model.
    """

    def __init__(self, salt: bytes, tokenize: Callable[[Namespace], list[int]], num_given: int | None = None) -> None:
        self.salt = salt
        self.num_given = num_given
        self._tokenize = tokenize
        self._known: dict[str, list[int]] = {}

    def tokens(self, namespace: Namespace) -> list[int]:
        """Return its token ids for the engines of a namespace.

        Raises:
            ConfigError: there is no tokenizer that makes them.
        """
        if namespace.model not in self._known:
            self._known[namespace.model] = self._tokenize(namespace)
        return self._known[namespace.model]

    def keys(self, namespaces: Mapping[str, Namespace]) -> dict[str, list[str]]:
        """Return the hex keys of the prompt's whole chunks in each namespace, by the namespace's hex id."""
        found = {}
        for ns, namespace in namespaces.items():
            try:
                identity = bytes.fromhex(namespace.identity)
            except ValueError:
                continue  # described by something that is not TierKV: no key of ours is in there
            root = root_key(identity, b"", self.salt)
            chunk_tokens = namespace.layout.chunk_tokens
            found[ns] = [key.hex() for key in chain_keys(root, self.tokens(namespace), chunk_tokens)]
        return found


def token_prompt(ids: Sequence[int], salt: bytes = b"") -> Prompt:
    """Return the prompt of these token ids."""
    tokens = list(ids)
    return Prompt(salt, lambda namespace: tokens, len(tokens))


def read_prompt(given: PromptOptions) -> Prompt | None:
    """Return the prompt that the options give, None for none.

    Raises:
        click.UsageError: options contradict each other.
        ConfigError: a file cannot be read, or what stands there is not what it is said to be.
    """
    kinds = [kind for kind in _KINDS if getattr(given, kind) is not None]
    _check_options(given, kinds)
    if not kinds:
        return None
    salt, kind = _salt(given), kinds[0]
    value: str = getattr(given, kind)
    if kind in ("tokens", "tokens_file"):
        return token_prompt(parse_tokens(value if kind == "tokens" else _read_text(value, kind)), salt)
    request = {"prompt": value if kind == "text" else _read_text(value, kind)}
    if kind == "chat":
        request = parse_chat(_read_text(value, kind))
        salt = salt or str(request.get("cache_salt") or "").encode()
    from tierkv.cli.tokenize import Tokenizers

    tokenizers = Tokenizers(given.tokenizer, given.engine, _engine_key(given))
    return Prompt(salt, lambda namespace: tokenizers.tokens(request, namespace.model))


def _check_options(given: PromptOptions, kinds: Sequence[str]) -> None:
    if len(kinds) > 1:
        raise click.UsageError(f"--{_flag(kinds[0])} and --{_flag(kinds[1])} are both given; give one of them")
    if given.salt is not None and given.salt_file is not None:
        raise click.UsageError("--salt and --salt-file are both given; give one of them")
    if not kinds and (given.salt is not None or given.salt_file is not None):
        raise click.UsageError("a salt is given without a prompt; give --tokens, --text or --chat too")
    if given.tokenizer is not None and given.engine is not None:
        raise click.UsageError("--tokenizer and --engine are both given; give one of them")
    if given.engine_key_file is not None and given.engine is None:
        raise click.UsageError("--engine-key-file is given without --engine; give the engine's URL too")
    for option in ("tokenizer", "engine"):
        if getattr(given, option) is not None and not {"text", "text_file", "chat"} & set(kinds):
            raise click.UsageError(f"--{option} is given without text; give --text, --text-file or --chat too")


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _salt(given: PromptOptions) -> bytes:
    if given.salt_file is not None:
        return _read(given.salt_file, "salt_file").removesuffix(b"\n").removesuffix(b"\r")
    return (given.salt or "").encode("utf-8", "surrogateescape")


def _engine_key(given: PromptOptions) -> str | None:
    if given.engine_key_file is None:
        return None
    return _read_text(given.engine_key_file, "engine_key_file").strip()


def parse_chat(text: str) -> dict[str, Any]:
    """Return the request that ``text`` holds: a list of chat messages, or the body of a chat completion request.

    Raises:
        ConfigError: it is neither.

    >>> parse_chat('[{"role": "user", "content": "hi"}]')
    {'messages': [{'role': 'user', 'content': 'hi'}]}
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the chat is not JSON ({error}); write a list of messages, or a request's body") from None
    request = {"messages": value} if isinstance(value, list) else value
    messages = request.get("messages") if isinstance(request, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConfigError('the chat has no messages; write [{"role": "user", "content": "..."}], or a request\'s body')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"a message of the chat has no role: {str(message)[:60]}; give each a role and a content")
    return dict(request)


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


def _read_text(name: str, option: str) -> str:
    return _read(name, option).decode("utf-8", "replace")


def _read(name: str, option: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{option}={name!r} cannot be read: {error.strerror}; name a file that you can read"
        ) from None
