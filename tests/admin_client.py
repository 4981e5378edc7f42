"""What tests of the admin server share: configurations, tokens, and a client of HTTP that sends what it is told."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from serving import make_config
from tierkv.server_config import HttpConfig, ServerConfig
from tierkv_server.server import Server

READER_TOKEN = "reader-" + 32 * "r"
ADMIN_TOKEN = "admin-" + 32 * "a"
JSON = {"content-type": "application/json"}
CHANGE = JSON | {"x-tierkv-admin": "1"}


class Answer(NamedTuple):
    """A reply: ``body`` is decoded where it is JSON."""

    status: int
    headers: Mapping[str, str]
    body: Any


class Client:
    """A client of a store server's admin server: a connection a request."""

    def __init__(self, server: Server, token: str | None = None, context: ssl.SSLContext | None = None) -> None:
        assert server.admin is not None
        self.address = server.admin.address
        self.token = token
        self._context = context

    def request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request and return the reply."""
        host, port = self.address
        link: http.client.HTTPConnection
        if self._context:
            link = http.client.HTTPSConnection(host, port, timeout=30, context=self._context)
        else:
            link = http.client.HTTPConnection(host, port, timeout=30)
        own = {"authorization": f"Bearer {self.token}"} if self.token else {}
        with contextlib.closing(link):
            link.request(method, path, body or None, {**own, **(headers or {})})
            reply = link.getresponse()
            data, kind = reply.read(), reply.headers.get_content_type()
            text = data.decode()
            return Answer(reply.status, reply.headers, json.loads(text) if kind == "application/json" else text)

    def get(self, path: str, status: int = 200, **headers: str) -> Any:
        """Return the body of a reply that has ``status``."""
        answer = self.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        assert answer.status == status, answer
        return answer.body

    def post(self, path: str, body: Any, status: int = 200, headers: Mapping[str, str] = CHANGE) -> Any:
        """Send JSON and return the body of a reply that has ``status``."""
        answer = self.request("POST", path, json.dumps(body).encode(), headers)
        assert answer.status == status, answer
        return answer.body


def admin_config(
    directory: Path, shared_url: str | None = None, listen: str = "127.0.0.1:0", **tokens: Any
) -> ServerConfig:
    """A store server with an admin server; ``tokens`` are fields of its :class:`ListenConfig`."""
    config = make_config(directory, shared_url=shared_url)
    return msgspec.structs.replace(
        config, http=HttpConfig(listen=listen), listen=msgspec.structs.replace(config.listen, **tokens)
    )


def token_files(directory: Path) -> dict[str, Path]:
    """Write the tokens of both roles to files, and return the fields of :class:`ListenConfig` that name them."""
    files = {}
    for role, token in (("reader", READER_TOKEN), ("admin", ADMIN_TOKEN)):
        path = directory / f"{role}-token"
        path.touch(mode=0o600)
        path.write_text(token + "\n")
        files[f"{role}_token_file"] = path
    return files
