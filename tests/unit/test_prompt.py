"""Prompts on the command line: token ids, text and chats, by a tokenizer read here or by an engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from tierkv.cli.prompt import Prompt, PromptOptions, parse_chat, read_prompt
from tierkv.errors import ConfigError, RefusedError, TierKVError, UnavailableError
from tierkv.keys import chain_keys, root_key
from tierkv.layout import LayerGroup, Layout, Namespace, Shard

WORDS = ["<s>", "<unk>", "system", "user", "assistant", "end", "tools", "hello", "there", "how", "are", "you"]
TEMPLATE = (
    "{% if tools %}tools {{ tools | length }} {% endif %}"
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}{% if polite %}you{% endif %}"
)
GROUP = LayerGroup("FullAttentionSpec", ("layer",), 1, 8, (64,), (1, 2, 16), (1, 2, 3))


def ids(words: str) -> list[int]:
    return [WORDS.index(word) if word in WORDS else 1 for word in words.split()]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tokenizer of a dozen words, which begins text with ``<s>`` and has a chat template."""
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def namespace(model: str | Path, chunk_tokens: int = 2) -> Namespace:
    return Namespace("ab" * 32, str(model), Layout(GROUP, "float32", 2, chunk_tokens, "TEST", "vec"), Shard())


def read(**given: Any) -> Prompt:
    prompt = read_prompt(PromptOptions(**{name: str(value) for name, value in given.items()}))
    assert prompt is not None
    return prompt


def chat_file(directory: Path, value: object) -> Path:
    path = directory / "chat.json"
    path.write_text(json.dumps(value))
    return path


# -- read here


def test_text_is_what_the_namespaces_model_makes_of_it(tokenizer: Path) -> None:
    prompt = read(text="hello there how are you")
    assert prompt.tokens(namespace(tokenizer)) == ids("<s> hello there how are you")
    assert prompt.num_given is None
    keys = prompt.keys({"n": namespace(tokenizer)})
    expected = chain_keys(root_key(bytes.fromhex("ab" * 32), b"", b""), prompt.tokens(namespace(tokenizer)), 2)
    assert keys == {"n": [key.hex() for key in expected]} and len(expected) == 3


def test_a_named_tokenizer_goes_before_the_models(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("you are")
    prompt = read(text_file=path, tokenizer=tokenizer)
    assert prompt.tokens(namespace("no/such-model")) == ids("<s> you are")


CHAT = [{"role": "system", "content": "hello"}, {"role": "user", "content": [{"type": "text", "text": "how are you"}]}]


@pytest.mark.parametrize(
    ("request_of", "words"),
    [
        (CHAT, "system hello end user how are you end assistant"),
        ({"messages": CHAT}, "system hello end user how are you end assistant"),
        ({"messages": CHAT, "add_generation_prompt": False}, "system hello end user how are you end"),
        ({"messages": CHAT[:1], "tools": [{"type": "function"}]}, "tools <unk> system hello end assistant"),
        ({"messages": CHAT[:1], "chat_template_kwargs": {"polite": True}}, "system hello end assistant you"),
        ({"messages": CHAT[:1], "chat_template": "there {{ messages[0].content }}"}, "there hello"),
        ([{"role": "assistant", "content": None}], "assistant end assistant"),
    ],
)
def test_a_chat_is_rendered_by_the_models_template(
    tokenizer: Path, tmp_path: Path, request_of: object, words: str
) -> None:
    prompt = read(chat=chat_file(tmp_path, request_of))
    assert prompt.tokens(namespace(tokenizer)) == ids(words)


def test_the_salt_of_a_requests_body_is_its_tenant(tmp_path: Path, tokenizer: Path) -> None:
    path = chat_file(tmp_path, {"messages": CHAT, "cache_salt": "alice"})
    assert read(chat=path).salt == b"alice"
    assert read(chat=path, salt="bob").salt == b"bob", "what is given beside it goes first"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"text": "hello"}, "name one with --tokenizer"),
        ({"text": "hello", "tokenizer": "no/such"}, "'no/such'"),
        ({"chat": [{"role": "user", "content": [{"type": "image_url"}]}], "tokenizer": True}, "not text"),
        ({"chat": {"messages": CHAT, "chat_template": "{{ raise_exception('odd') }}"}, "tokenizer": True}, "odd"),
    ],
)
def test_what_no_tokenizer_takes(tokenizer: Path, tmp_path: Path, given: dict[str, Any], words: str) -> None:
    if "chat" in given:
        given = given | {"chat": chat_file(tmp_path, given["chat"])}
    if given.get("tokenizer") is True:
        given = given | {"tokenizer": tokenizer}
    with pytest.raises(ConfigError, match=words):
        read(**given).tokens(namespace("no/such-model"))


@pytest.mark.parametrize("text", ["{", "[]", "{}", "3", '[{"content": "x"}]', '["x"]', '{"messages": "x"}'])
def test_what_is_no_chat(text: str) -> None:
    with pytest.raises(ConfigError, match=r"chat"):
        parse_chat(text)


@pytest.mark.parametrize(
    "given",
    [
        {"text": "a", "tokens": "1"},
        {"text": "a", "text_file": "b"},
        {"chat": "a", "tokens_file": "b"},
        {"salt": "a"},
        {"tokens": "1", "tokenizer": "a"},
        {"tokens": "1", "engine": "http://a"},
        {"text": "a", "tokenizer": "a", "engine": "http://a"},
        {"text": "a", "engine_key_file": "a"},
    ],
)
def test_options_that_contradict_each_other(given: dict[str, str]) -> None:
    with pytest.raises(click.UsageError):
        read_prompt(PromptOptions(**given))


# -- by an engine


class Asked(BaseHTTPRequestHandler):
    """Answers as a vLLM server does, with what the class says."""

    answer: tuple[int, object] = (200, {"tokens": [3, 1, 4]})
    bodies: list[dict[str, Any]] = []  # noqa: RUF012
    keys: list[str | None] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append({"path": self.path} | body)
        self.keys.append(self.headers.get("Authorization"))
        code, value = self.answer
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def engine() -> Iterator[str]:
    Asked.answer, Asked.bodies, Asked.keys = (200, {"tokens": [3, 1, 4]}), [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_an_engine_makes_the_token_ids(engine: str, tmp_path: Path, suffix: str) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    body = {"messages": CHAT, "tools": [{"type": "function"}], "temperature": 1}
    prompt = read(chat=chat_file(tmp_path, body), engine=engine + suffix, engine_key_file=key)
    assert prompt.tokens(namespace("a/model")) == [3, 1, 4]
    assert Asked.bodies == [{"path": "/tokenize", "messages": CHAT, "tools": [{"type": "function"}]}]
    assert Asked.keys == ["Bearer secret"]
    assert read(text="hello", engine=engine).tokens(namespace("a/model")) == [3, 1, 4]
    assert Asked.bodies[1] == {"path": "/tokenize", "prompt": "hello"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((401, {"error": "Unauthorized"}), "401: .*Unauthorized"),
        ((400, {"error": {"message": "no such role"}}), "400: no such role"),
        ((200, {"hello": "world"}), "not a vLLM server"),
        ((200, []), "not a vLLM server"),
    ],
)
def test_an_engine_that_makes_none(engine: str, answer: tuple[int, object], words: str) -> None:
    Asked.answer = answer
    with pytest.raises(RefusedError, match=words):
        read(text="hello", engine=engine).tokens(namespace("a/model"))


@pytest.mark.parametrize(
    ("url", "kind"),
    [("http://127.0.0.1:9", UnavailableError), ("127.0.0.1:8000", ConfigError), ("http://", ConfigError)],
)
def test_an_engine_that_is_not_there(url: str, kind: type[TierKVError]) -> None:
    with pytest.raises(kind, match="engine"):
        read(text="hello", engine=url).tokens(namespace("a/model"))
