"""Text and chats as token ids, as an engine makes them: by the model's own tokenizer, or by asking the engine.

An engine's own answer (vLLM's ``POST /tokenize``) is exact for every model, template and vLLM version. A tokenizer
read here (``transformers``, the library that vLLM reads it with) is the same for text, and for chats whose messages are
text. Nothing is fetched from a hub: a tokenizer that is not on this machine is an error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tierkv.errors import ConfigError, RefusedError, UnavailableError

_TIMEOUT_S = 30.0
_MAX_REPLY_NBYTES = 64 << 20
#: What of a request's body decides its token ids, beside the messages or the prompt.
_ENGINE_FIELDS = (
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


class Tokenizers:
    """Makes token ids of requests.

    Args:
        tokenizer: directory, or name of a model that is on this machine; None: the namespace's model.
        engine: base URL of a vLLM server that makes them instead.
        engine_key: what that server wants as its API key.
    """

    def __init__(self, tokenizer: str | None, engine: str | None, engine_key: str | None = None) -> None:
        self._name = tokenizer
        self._engine = engine
        self._engine_key = engine_key

    def tokens(self, request: Mapping[str, Any], model: str) -> list[int]:
        """Return the token ids of a request: ``{"prompt": text}``, or a chat completion's body.

        Args:
            request: what an engine is asked.
            model: the name of its model, as its engines were given it.

        Raises:
            ConfigError: there is no tokenizer for it here, or it does not take the request.
            UnavailableError: the engine does not answer.
            RefusedError: the engine does not make token ids of it.
        """
        if self._engine is not None:
            return ask_engine(self._engine, request, self._engine_key)
        tokenizer = _load(self._name or model, named=self._name is not None)
        if "messages" not in request:
            return list(tokenizer.encode(request["prompt"], add_special_tokens=True))
        return _chat(tokenizer, request)


def _load(name: str, *, named: bool) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            "making token ids of text needs the package transformers, which is not installed here; install "
            "tierkv[text], or give --engine URL of a running vLLM server, or token ids with --tokens"
        ) from None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:  # of many kinds, by what a directory lacks
        hint = "name its directory" if named else "name one with --tokenizer, or ask the engine with --engine URL"
        first = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise ConfigError(f"no tokenizer of {name!r} can be read on this machine ({first}); {hint}") from None


def _chat(tokenizer: Any, request: Mapping[str, Any]) -> list[int]:
    options = dict(request.get("chat_template_kwargs") or {})
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in request:
            options[name] = request[name]
    options.setdefault("add_generation_prompt", not options.get("continue_final_message", False))
    try:
        ids = tokenizer.apply_chat_template(
            [_message(message) for message in request["messages"]],
            tools=request.get("tools"),
            chat_template=request.get("chat_template"),
            tokenize=True,
            return_dict=False,
            **options,
        )
    except ConfigError:
        raise
    except Exception as error:  # whatever the model's template raises about the messages
        raise ConfigError(
            f"the model's chat template does not take this chat ({error}); ask the engine with --engine URL"
        ) from None
    return [int(token) for token in ids]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as one text, as vLLM gives it to templates that want that."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(
                "a message has content that is not text, whose token ids depend on the model's own processing; "
                "ask the engine with --engine URL"
            )
        content = "\n".join(map(str, texts))
    return {**message, "content": content if content is not None else ""}


def ask_engine(url: str, request: Mapping[str, Any], key: str | None) -> list[int]:
    """Return the token ids that a vLLM server makes of a request (``POST /tokenize``).

    Raises:
        ConfigError: the URL is none.
        UnavailableError: nobody answers there in time.
        RefusedError: the server does not make token ids of it.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"engine={url!r} is not the URL of a vLLM server; write http://HOST:PORT")
    base = url.rstrip("/").removesuffix("/v1")
    what = "messages" if "messages" in request else "prompt"
    body = {what: request[what]} | {name: request[name] for name in _ENGINE_FIELDS if name in request}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    ask = urllib.request.Request(f"{base}/tokenize", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(ask, timeout=_TIMEOUT_S) as reply:
            tokens = json.loads(reply.read(_MAX_REPLY_NBYTES))["tokens"]
        return [int(token) for token in tokens]
    except urllib.error.HTTPError as error:
        raise RefusedError(f"the engine at {url} makes no token ids of it ({error.code}: {_reason(error)})") from None
    except (OSError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)
        raise UnavailableError(f"the engine at {url} does not answer ({reason}); is it running?") from None
    except (ValueError, KeyError, TypeError):
        raise RefusedError(f"what answers at {url} is not a vLLM server: it has no token ids to give") from None


def _reason(error: urllib.error.HTTPError) -> str:
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        body = json.loads(error.read(65536))
        message = body.get("error", {}).get("message") if isinstance(body.get("error"), dict) else body.get("message")
        return " ".join(str(message or body).split())[:200]
    return str(error.reason)
