"""The example router between prefill and decode engines, in front of HTTP servers that stand for the engines."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pd_router import Router

PROMISE = {"namespace": "00" * 16, "last_key": "11" * 32, "tokens": 64}


class FakeApi(ThreadingHTTPServer):
    """Answers every request with ``answer``, in two parts, and remembers what came."""

    daemon_threads = True

    def __init__(self, answer: Any, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.status = answer, status
        self.asked: list[tuple[str, Any, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeApi

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(data) if data.startswith(b"{") else data
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        self.send_response(self.server.status)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        text = json.dumps(self.server.answer).encode()
        for part in (text[:5], text[5:]):
            self.wfile.write(part)
            self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(*servers: ThreadingHTTPServer) -> Iterator[None]:
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.fixture
def decode() -> FakeApi:
    return FakeApi({"text": "done"})


def post(router: Router, data: bytes, path: str = "/v1/completions") -> tuple[int, bytes, str | None]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{router.server_port}{path}", data, {"Authorization": "Bearer t"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read(), reply.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers["Content-Type"]


def test_the_promise_of_the_first_engine_goes_to_the_second(decode: FakeApi) -> None:
    told = {"tierkv": {"handoff": PROMISE, "hit_tokens": {}, "session": "00ff"}}
    prefills = [FakeApi({"kv_transfer_params": told}) for _ in range(2)]
    body = {
        "prompt": [1, 2],
        "max_tokens": 9,
        "stream": True,
        "n": 2,
        "kv_transfer_params": {"tierkv": {"session": "chat"}, "other": 1},
    }
    with (
        Router(("127.0.0.1", 0), [p.url for p in prefills], [decode.url]) as router,
        serving(*prefills, decode, router),
    ):
        for _ in range(2):
            status, data, kind = post(router, json.dumps(body).encode())
            assert (status, json.loads(data), kind) == (200, decode.answer, "text/event-stream")
    first = {"prompt": [1, 2], "max_tokens": 1, "kv_transfer_params": {"tierkv": {"session": "chat", "handoff": True}}}
    assert [prefill.asked for prefill in prefills] == [[("/v1/completions", first, "Bearer t")]] * 2
    params = {"tierkv": {"session": "chat", "handoff": PROMISE}, "other": 1}
    assert decode.asked == [("/v1/completions", body | {"kv_transfer_params": params}, "Bearer t")] * 2


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({"kv_transfer_params": None}, 200),
        ({"kv_transfer_params": {"tierkv": {}}}, 200),
        ([1], 200),
        ({}, 500),
        (None, 0),
    ],
)
def test_without_a_promise_the_second_engine_does_it_all(decode: FakeApi, answer: Any, status: int) -> None:
    prefill = FakeApi(answer, status)
    body = {"prompt": "x", "kv_transfer_params": {"tierkv": {"session": "chat"}}}
    with Router(("127.0.0.1", 0), [prefill.url], [decode.url]) as router, serving(decode, router):
        if not status:
            prefill.server_close()  # nobody answers there
            assert post(router, json.dumps(body).encode())[0] == 200
        else:
            with serving(prefill):
                assert post(router, json.dumps(body).encode())[0] == 200
    assert [asked for _, asked, _ in decode.asked] == [body]


def test_what_is_no_request_for_tokens_goes_through(decode: FakeApi) -> None:
    prefill = FakeApi({})
    decode.status = 404
    with Router(("127.0.0.1", 0), [prefill.url], [decode.url]) as router, serving(prefill, decode, router):
        assert post(router, b"nonsense")[0] == 404
        assert post(router, b"[1]")[0] == 404
        assert post(router, b'{"a": 1}', "/v1/embeddings")[0] == 404
        with pytest.raises(urllib.error.HTTPError, match="404") as error:
            urllib.request.urlopen(f"http://127.0.0.1:{router.server_port}/v1/models", timeout=20)
        error.value.close()
    assert [path for path, _, _ in decode.asked] == ["/v1/completions"] * 2 + ["/v1/embeddings", "/v1/models"]
    assert not prefill.asked


def test_a_second_engine_that_is_gone_is_said(decode: FakeApi) -> None:
    decode.server_close()
    with Router(("127.0.0.1", 0), [decode.url], [decode.url]) as router, serving(router):
        assert post(router, b"{}")[0] == 502
