"""The OpenAPI 3.1 document, made of the table of endpoints and the structs of the schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tierkv import __version__
from tierkv_server.access import Role
from tierkv_server.admin import schema
from tierkv_server.admin.endpoints import ENDPOINTS, Endpoint
from tierkv_server.admin.guard import CHANGE_HEADER

_REF = "#/components/schemas/{name}"
_DESCRIPTION = """\
Health, metrics and management of a TierKV store server. A role whose token is configured is asked for it, as a bearer
token. Where none is, on the loopback, a change needs the header `X-TierKV-Admin: 1`. Errors are JSON with one sentence.
"""
_WHAT = {
    400: "what was sent is not right",
    401: "a token is needed, or it is not right",
    403: "this caller may not",
    404: "what is named is not stored",
    405: "not a method of this path",
    408: "the body did not come in time",
    409: "refused: several things are meant, a tier is not here, or it is pinned",
    413: "the body is too large",
    415: "the body is not JSON",
    421: "not a name of this server",
    500: "a fault of the server",
    503: "busy, or a tier or an engine does not answer",
}


def make_document(pages: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """Return the document.

    Args:
        pages: the files of the dashboard: path, name, media type.
    """
    types = [t for e in ENDPOINTS for t in (e.reply, e.takes) if t is not None and t is not schema.Nothing]
    refs, components = msgspec.json.schema_components([*types, schema.Error], ref_template=_REF)
    by_type = dict(zip([*types, schema.Error], refs, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, by_type, components)
    for path, name, media in [*pages, ("/openapi.json", "this document", "application/json")]:
        reply = {"description": name, "content": {media.partition(";")[0]: {}}}
        paths[path] = {"get": {"summary": f"The dashboard: {name}", "responses": {"200": reply}, "security": []}}
    paths["/openapi.json"]["get"]["summary"] = "This document"
    return {
        "openapi": "3.1.0",
        "info": {"title": "TierKV store server", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": CHANGE_HEADER},
            },
        },
    }


def _operation(endpoint: Endpoint, by_type: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    content = {endpoint.media: {"schema": by_type[endpoint.reply] if endpoint.reply else {"type": "string"}}}
    responses = {str(status): {"description": "done", "content": content} for status in (200, *endpoint.also)}
    for status in sorted({*_common_errors(endpoint), *endpoint.errors}):
        if str(status) not in responses:
            reply = {"application/json": {"schema": by_type[schema.Error]}}
            responses[str(status)] = {"description": _WHAT[status], "content": reply}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses, "security": _security(endpoint)}
    parameters = list(_path_parameters(endpoint.path))
    if endpoint.method == "GET":
        parameters += _query_parameters(endpoint.takes, components)
    else:
        body = {"application/json": {"schema": by_type[endpoint.takes]}}
        operation["requestBody"] = {"required": True, "content": body}
    if parameters:
        operation["parameters"] = parameters
    return operation


def _common_errors(endpoint: Endpoint) -> set[int]:
    errors = {400, 421}
    if endpoint.role is not Role.NOBODY:
        errors |= {401, 403}
    if not endpoint.inline:
        errors |= {500, 503}
    if endpoint.method == "POST":
        errors |= {408, 413, 415}
    return errors


def _security(endpoint: Endpoint) -> list[dict[str, list[str]]]:
    if endpoint.role is Role.NOBODY:
        return []
    return [{"token": []}, {"header": []} if endpoint.role is Role.ADMIN else {}]


def _path_parameters(path: str) -> Iterable[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", path):
        pattern = {"type": "string", "pattern": "^[0-9a-f]{1,64}$"}
        yield {"name": name, "in": "path", "required": True, "schema": pattern}


def _query_parameters(takes: type[msgspec.Struct], components: dict[str, Any]) -> list[dict[str, Any]]:
    if takes is schema.Nothing:
        return []
    properties = components.get(takes.__name__, {}).get("properties", {})
    return [{"name": name, "in": "query", "schema": about} for name, about in properties.items()]
