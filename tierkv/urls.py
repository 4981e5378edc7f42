"""URLs that hold secrets: how they are shown, and what must never be."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, unquote, urlsplit


def redact_url(url: str | None) -> str:
    """Return ``url`` without what may be secret in it: passwords, and a user name that stands alone.

    >>> redact_url("redis://me:secret@cache:6379/0")
    'redis://me:***@cache:6379/0'
    """
    if not url:
        return ""
    url = re.sub(r"^((?:\w+://)?[^/@:]*):(?!//).*@", r"\1:***@", url, flags=re.DOTALL)
    url = re.sub(r"://[^/@:]+@", "://***@", url)
    return re.sub(r"([?&][^=&]*(?:password|secret|token)[^=&]*=)[^&]*", r"\1***", url, flags=re.IGNORECASE)


def url_secrets(url: str) -> list[str]:
    """Return what in ``url`` is secret, as written and as meant, longest first."""
    try:
        parts = urlsplit(url)
        found = [parts.password or "", *parse_qs(parts.query).get("password", [])]
    except ValueError:
        return []
    return sorted({s for raw in found for s in (raw, unquote(raw)) if s}, key=len, reverse=True)
