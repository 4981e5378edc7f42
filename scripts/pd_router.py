"""A small router in front of engines that compute prompts and engines that go on from there. An example, and for tests.

    scripts/pd-router --prefill http://p1:8000 --prefill http://p2:8000 --decode http://d1:8000 --port 8080

A request of the OpenAI API (``/v1/completions``, ``/v1/chat/completions``) goes to a prefill engine first, for one
token. What that answers in ``kv_transfer_params`` under ``tierkv`` goes with the request to a decode engine, which
waits for the promised chunks and computes the rest. Where the first step fails, the decode engine computes everything.
What else is asked goes to a decode engine as it is. Engines take turns; there is no authentication and no health check.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GENERATES = ("/v1/completions", "/v1/chat/completions")
#: Fields of a request that make no sense for the one token of the first step.
LATER = ("stream", "stream_options", "n", "best_of", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs")
TIMEOUT_S = 600.0
CHUNK_NBYTES = 1 << 16


def first_step(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request for the prefill engine: one token, whose chunks are handed off."""
    own = _hints(body) | {"handoff": True}
    return {k: v for k, v in body.items() if k not in LATER} | {
        "max_tokens": 1,
        "kv_transfer_params": {"tierkv": own},
    }


def second_step(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return the request for the decode engine: the client's own, and what the prefill engine promised."""
    told = answer.get("kv_transfer_params")
    promise = told.get("tierkv", {}).get("handoff") if isinstance(told, dict) else None
    if promise is None:
        return body
    others = body.get("kv_transfer_params")
    params = dict(others) if isinstance(others, dict) else {}
    return body | {"kv_transfer_params": params | {"tierkv": _hints(body) | {"handoff": promise}}}


def _hints(body: dict[str, Any]) -> dict[str, Any]:
    params = body.get("kv_transfer_params")
    own = params.get("tierkv") if isinstance(params, dict) else None
    return dict(own) if isinstance(own, dict) else {}


class Router(ThreadingHTTPServer):
    """The router's HTTP server.

    Args:
        address: host and port; port 0 takes a free one.
        prefill, decode: base URLs of the engines.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], prefill: Sequence[str], decode: Sequence[str]) -> None:
        super().__init__(address, Handler)
        self.prefill: Iterator[str] = itertools.cycle(prefill)
        self.decode: Iterator[str] = itertools.cycle(decode)


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    server: Router
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.split("?")[0] in GENERATES:
            with contextlib.suppress(ValueError, AttributeError):  # what is no object is the engine's to refuse
                body = json.loads(data)
                data = json.dumps(second_step(body, self._prefill(first_step(body)))).encode()
        self._pass_on(data)

    def _prefill(self, body: dict[str, Any]) -> dict[str, Any]:
        """Have the prompt computed and return the answer; an empty one where that failed."""
        url = next(self.server.prefill)
        try:
            with self._open(url, json.dumps(body).encode()) as reply:
                answer = json.load(reply)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.log_error("the prefill engine %s failed: %s", url, error)
            return {}
        return answer if isinstance(answer, dict) else {}

    def _pass_on(self, data: bytes | None) -> None:
        """Send a request to a decode engine, and its answer to the client as it comes."""
        url = next(self.server.decode)
        try:
            reply = self._open(url, data)
        except urllib.error.HTTPError as error:
            reply = error  # an answer too
        except (OSError, http.client.HTTPException) as error:
            self.log_error("the decode engine %s failed: %s", url, error)
            self.send_error(502, "the decode engine does not answer")
            return
        self.close_connection = True
        with reply:
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.headers.get("Content-Type", "application/json"))
            self.send_header("Connection", "close")
            self.end_headers()
            while part := reply.read1(CHUNK_NBYTES):
                self.wfile.write(part)

    def _open(self, url: str, data: bytes | None) -> Any:
        headers = {name: self.headers[name] for name in ("Content-Type", "Authorization") if name in self.headers}
        request = urllib.request.Request(url.rstrip("/") + self.path, data, headers, method=self.command)
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="an engine for prompts")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="an engine that goes on")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    args = parser.parse_args(argv)
    with Router((args.host, args.port), args.prefill, args.decode) as router, contextlib.suppress(KeyboardInterrupt):
        print(f"serving on http://{args.host}:{router.server_port}", flush=True)
        router.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
