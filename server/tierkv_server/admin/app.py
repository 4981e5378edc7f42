"""The HTTP application: takes requests in, has them done in a small pool of threads, and sends replies.

The event loop only reads, checks and writes; nothing that waits for a tier or an engine runs on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import resources
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tierkv.errors import ConfigError, NotFoundError, RefusedError, TierKVError, UnavailableError
from tierkv_server.access import AUTH_DELAY_S, Role
from tierkv_server.admin import schema
from tierkv_server.admin.api import Api
from tierkv_server.admin.endpoints import ENDPOINTS, Caller, Endpoint, Reply
from tierkv_server.admin.explain import explain
from tierkv_server.admin.guard import ApiError, Guard, SafeHeaders, WrongTokenError
from tierkv_server.admin.openapi import make_document

logger = logging.getLogger("tierkv")

#: A prompt of a million tokens in JSON.
MAX_BODY_NBYTES = 8 << 20
#: A client may take this long to send a body.
BODY_TIMEOUT_S = 10.0
#: Bodies that are read at a time: this many times their size is the memory that clients can take.
MAX_BODIES = 4
#: Threads that call the tiers, calls that may be under way or wait for one, and how long anybody waits for an answer.
NUM_THREADS = 4
MAX_CALLS = 32
CALL_TIMEOUT_S = 30.0

#: What the dashboard is made of: path, file, media type.
PAGES = (
    ("/", "dashboard.html", "text/html; charset=utf-8"),
    ("/dashboard.css", "dashboard.css", "text/css; charset=utf-8"),
    ("/dashboard.js", "dashboard.js", "text/javascript; charset=utf-8"),
    ("/icon.svg", "icon.svg", "image/svg+xml"),
)

#: Asked by whoever watches the process, who may have an old token and is not to be told so.
PROBES = ("/healthz", "/readyz")

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (NotFoundError, 404),
    (RefusedError, 409),
    (UnavailableError, 503),
    (ConfigError, 400),
    (TierKVError, 500),
)


class App:
    """The application.

    Args:
        api: does the work.
        guard: says who may.
    """

    def __init__(self, api: Api, guard: Guard) -> None:
        self._api = api
        self._guard = guard
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tierkv-admin")
        self._calls: set[Future[Any]] = set()
        self._bodies = asyncio.Semaphore(MAX_BODIES)

    def asgi(self) -> ASGIApp:
        """Return the application with its routes."""
        routes = [Route(e.path, self._endpoint(e), methods=[e.method]) for e in ENDPOINTS]
        routes += [Route(path, self._page(name, media)) for path, name, media in PAGES]
        document = msgspec.json.encode(make_document(PAGES))
        routes.append(Route("/openapi.json", self._fixed(document, "application/json")))
        return SafeHeaders(Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _fault}))

    def close(self, timeout_s: float) -> None:
        """Let calls under way end, for ``timeout_s`` at most; those that wait for a thread are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait(list(self._calls), timeout_s)

    # -- routes

    def _page(self, name: str, media: str) -> Callable[[Request], Awaitable[Response]]:
        return self._fixed((resources.files("tierkv_server.admin") / "static" / name).read_bytes(), media)

    def _fixed(self, body: bytes, media: str) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                self._guard.check_host(request.headers)
            except ApiError as error:
                return _error(error)
            return Response(body, media_type=media)

        return handle

    def _endpoint(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                self._guard.check_host(request.headers)
                if endpoint.path not in PROBES:
                    self._guard.check_known(request.headers)
                self._guard.check(endpoint.role, request.headers)
                reply = await self._do(endpoint, request)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            except WrongTokenError as error:
                self._guard.note_wrong(request.client.host if request.client else "an unknown address")
                await asyncio.sleep(AUTH_DELAY_S)
                return _error(error)
            except ApiError as error:
                return _error(error)
            if not isinstance(reply, Reply):
                reply = Reply(reply)
            body = reply.body if isinstance(reply.body, bytes) else await self._encode(endpoint, reply.body)
            return Response(body, reply.status, media_type=reply.media)

        return handle

    async def _encode(self, endpoint: Endpoint, body: Any) -> bytes:
        return msgspec.json.encode(body) if endpoint.inline else await self._call(lambda: msgspec.json.encode(body))

    async def _do(self, endpoint: Endpoint, request: Request) -> Any:
        who = self._caller(request)
        if endpoint.method == "GET":
            taken = _query(endpoint.takes, request)
            if endpoint.inline:
                return endpoint.call(self._api, taken, who)
            return await self._call(lambda: endpoint.call(self._api, taken, who))
        async with self._bodies:
            body = await _read_body(request)
            return await self._call(lambda: endpoint.call(self._api, _decode(endpoint.takes, body), who))

    def _caller(self, request: Request) -> Caller:
        guard, headers = self._guard, request.headers
        return Caller(
            path=dict(request.path_params),
            accept=headers.get("accept", ""),
            may_read=guard.may(Role.READER, headers),
            may_change=guard.may(Role.ADMIN, headers),
            asks_token=guard.asks(Role.ADMIN) or guard.asks(Role.READER),
        )

    async def _call(self, what: Callable[[], Any]) -> Any:
        """Have something done in a thread, and return its result.

        Raises:
            ApiError: too many calls are under way, it took too long, or it failed.
        """
        if len(self._calls) >= MAX_CALLS:
            sentence = f"{len(self._calls)} requests are under way; ask again in a moment"
            raise ApiError(503, sentence, {"retry-after": "1"})
        call = self._pool.submit(what)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        future = asyncio.wrap_future(call)
        # Not cancelled when time is over: a thread cannot be, and counts until it has ended.
        done, _ = await asyncio.wait([future], timeout=CALL_TIMEOUT_S)
        if not done:
            future.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise ApiError(503, f"there is no answer after {CALL_TIMEOUT_S:g} s; what was asked may yet be done")
        try:
            return future.result()
        except ApiError:
            raise
        except Exception as error:
            raise _as_api_error(error) from error


def _as_api_error(error: Exception) -> ApiError:
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return ApiError(status, str(error))
    if isinstance(error, msgspec.MsgspecError | ValueError):
        return ApiError(400, f"what was sent is not right: {error}")
    logger.error("an admin request failed", exc_info=error)
    return ApiError(500, f"this failed in the server ({type(error).__name__}); its log has the details")


def _query(takes: type[msgspec.Struct], request: Request) -> Any:
    """Return the query's parameters as a struct.

    Raises:
        ApiError: 400, one is unknown, given twice, or wrong.
    """
    fields = {f.name: f for f in msgspec.structs.fields(takes)}
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name not in fields:
            known = ", ".join(fields) or "none"
            raise ApiError(400, f"there is no parameter {name[:40]!r}; those of {request.url.path} are: {known}")
        if fields[name].default_factory is list:
            values.setdefault(name, []).append(value)
        elif name in values:
            raise ApiError(400, f"the parameter {name!r} is given twice")
        else:
            values[name] = value
    try:
        return msgspec.convert(values, takes, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"a parameter is not right: {explain(error, takes)}") from None


async def _read_body(request: Request) -> bytes:
    """Return the body.

    Raises:
        ApiError: it is not JSON by its type, too large, or does not come in time.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body has to be JSON; send it with 'Content-Type: application/json'")
    too_large = ApiError(413, f"the body is larger than {MAX_BODY_NBYTES} bytes")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_BODY_NBYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_NBYTES:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", {"connection": "close"}) from None
    return bytes(body)


def _decode(takes: type[msgspec.Struct], body: bytes) -> Any:
    try:
        return msgspec.json.decode(body, type=takes)
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"the body is not right: {explain(error, takes)}") from None


def _error(error: ApiError) -> Response:
    result = error.result if isinstance(error.result, dict) else None
    body = msgspec.json.encode(schema.Error(error.sentence, result))
    return Response(body, error.status, error.headers, "application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """Say in our own way what the router found."""
    assert isinstance(error, HTTPException)
    sentences = {
        404: f"there is no {request.url.path[:100]!r} here; /openapi.json lists what there is",
        405: f"{request.method} is not a method of {request.url.path[:100]!r}; /openapi.json lists what is",
    }
    headers = error.headers or {}
    return _error(ApiError(error.status_code, sentences.get(error.status_code, error.detail), headers))


async def _fault(request: Request, error: Exception) -> Response:
    return _error(_as_api_error(error))
