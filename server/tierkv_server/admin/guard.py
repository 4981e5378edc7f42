"""Who may do what, and what a request must look like before anything is done for it.

The rules, which ``docs/http.md`` explains:

- *Roles.* ``reader`` looks, ``admin`` looks and changes. A role whose token is configured is asked for it, as a bearer
  token. Off the loopback both are asked for, and a role without a token cannot be had.
- *Browsers.* There are no cookies, and no CORS header is ever sent: a page of another origin can neither read a reply
  nor send a token. What such a page could do to a server that asks for no token is refused thrice: by the ``Host``
  header (a name that a stranger's DNS points here), by ``Origin`` and ``Sec-Fetch-Site``, and for changes by a header
  of our own, which browsers send to another origin only after asking it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierkv_server.access import Access, Role

#: Must come with a change where no token does.
CHANGE_HEADER = "x-tierkv-admin"

_NO_ADMIN = "no admin token is configured, so nothing can be changed here; set listen.admin_token_file"
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Mapping[str, str] = {
    "content-security-policy": _CSP,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


class ApiError(Exception):
    """A reply that is an error: its status, a sentence, and more headers."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = dict(headers or {})
        self.result: object = None


class WrongTokenError(ApiError):
    """A token that is no role's."""


class Guard:
    """Decides about requests by their headers.

    Args:
        access: the tokens, as they are now.
        loopback: the server listens on the loopback alone.
    """

    def __init__(self, access: Access, loopback: bool) -> None:
        self._access = access
        self._loopback = loopback

    def asks(self, role: Role) -> bool:
        """Return whether a token is asked of ``role``."""
        return role is not Role.NOBODY and (not self._loopback or self._access.tokens.has(role))

    def may(self, role: Role, headers: Headers) -> bool:
        """Return whether a request with these headers may do what ``role`` may."""
        try:
            self.check(role, headers)
        except ApiError:
            return False
        return True

    def check(self, role: Role, headers: Headers) -> None:
        """Let a request pass, or not. ``Role.NOBODY``: everybody may.

        Raises:
            ApiError: 401 without the token that is asked for, 403 where another would be needed or a browser is misled.
        """
        if role is Role.NOBODY:
            return
        self._check_origin(headers)
        if self.asks(role):
            self._check_token(role, _bearer(headers))
        elif role is Role.ADMIN:
            self._check_unasked_change(headers)

    def note_wrong(self, peer: str) -> None:
        """Count a wrong token that came from ``peer``."""
        self._access.failures.note(peer)

    def check_known(self, headers: Headers) -> None:
        """Refuse a token that is nobody's, also where none is asked for: it is a mistake, or a guess.

        Raises:
            WrongTokenError: 401.
        """
        token, tokens = _bearer(headers), self._access.tokens
        if token is not None and tokens and tokens.role_of(_encode(token)) is None:
            raise WrongTokenError(401, "this token is nobody's; send none, or the one that is configured now")

    def _check_token(self, role: Role, token: str | None) -> None:
        tokens = self._access.tokens
        given = tokens.role_of(_encode(token)) if token is not None else None
        if given in (role, Role.ADMIN):
            return
        if role is Role.ADMIN and not tokens.has(Role.ADMIN):
            raise ApiError(403, _NO_ADMIN)
        if given is not None:
            raise ApiError(403, f"this is the {given.value}'s token; the {role.value}'s is needed")
        sentence = f"send the {role.value}'s token as 'Authorization: Bearer TOKEN'"
        headers = {"www-authenticate": f'Bearer realm="tierkv {role.value}"'}
        if token is None:
            raise ApiError(401, f"a token is needed; {sentence}", headers)
        raise WrongTokenError(401, f"this token is nobody's; {sentence}", headers)

    def _check_unasked_change(self, headers: Headers) -> None:
        if self._access.tokens.has(Role.READER):
            raise ApiError(403, _NO_ADMIN)
        if CHANGE_HEADER not in headers:
            raise ApiError(
                403, "a change without a token needs the header 'X-TierKV-Admin: 1', other sites cannot send it"
            )

    def _check_origin(self, headers: Headers) -> None:
        site = headers.get("sec-fetch-site", "none")
        origin = headers.get("origin")
        own = origin is None or origin.partition("://")[2] == headers.get("host", "")
        if site not in ("none", "same-origin") or not own:
            raise ApiError(403, "this comes from a page of another origin, which has no business here")

    def check_host(self, headers: Headers) -> None:
        """Refuse names that are not the loopback's, where the server listens there alone.

        Raises:
            ApiError: 421; the name may be a stranger's that points here (DNS rebinding).
        """
        host = headers.get("host", "")
        if self._loopback and host and not _is_loopback_name(host):  # browsers always send one
            raise ApiError(
                421,
                f"the host {host[:100]!r} is not this server's, which listens on the loopback alone; ask for "
                f"localhost or 127.0.0.1 (a proxy before it has to set the Host header)",
            )


def _bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _encode(token: str) -> bytes:
    return token.encode("utf-8", "surrogateescape")


def _is_loopback_name(host: str) -> bool:
    """Return whether a Host header names the loopback.

    >>> [_is_loopback_name(h) for h in ("localhost:80", "[::1]:80", "127.1.2.3", "evil.example", "")]
    [True, True, True, False, False]
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower() == "localhost" or is_loopback_address(name)


def is_loopback_address(address: str) -> bool:
    """Return whether ``address`` is an IP address of the loopback."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class SafeHeaders:
    """ASGI middleware: puts the headers that browsers act on into every reply.

    Args:
        app: what answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        await self._app(scope, receive, send_safely)
