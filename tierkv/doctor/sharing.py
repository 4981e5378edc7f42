"""Why engines that should share do not: what differs between the namespaces of one model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Any

import msgspec

from tierkv.doctor import Finding, ok, warn
from tierkv.layout import Namespace

_NS_DIGITS = 8
_MAX_SHOWN = 6
#: What to make equal, by the beginning of the field that differs.
_ADVICE = (
    (
        "identity",
        "the weights, the model's configuration or the settings that decide its KV differ (files of the model, dtype, "
        "quantization, hf_overrides, rope, kv_cache_dtype): sha256sum the model's files on both machines, and compare "
        "the engines' arguments",
    ),
    ("layout.chunk_tokens", "give both engines the same chunk_tokens"),
    ("layout.block_tokens", "give both engines the same --block-size"),
    ("layout.dtype", "give both engines the same --kv-cache-dtype and --dtype"),
    ("layout.backend", "give both engines the same attention backend"),
    ("layout.isa", "their processors or devices pack KV differently: such engines cannot share"),
    ("layout.version", "run the same TierKV version"),
    ("shard", "give both engines the same parallel sizes, or portable_ranks=true"),
    ("layout", "the KV cache has another shape: the same model, vLLM and attention backend make it equal"),
)


def check(namespaces: Mapping[str, Namespace], tenants: Mapping[str, int]) -> Iterator[Finding]:
    """Compare the namespaces of each model.

    Args:
        namespaces: what is stored or served, by hex id.
        tenants: how many tenants have something in each.
    """
    models: defaultdict[str, list[str]] = defaultdict(list)
    for ns in sorted(namespaces):
        models[PurePath(namespaces[ns].model).name.lower() or "(no name)"].append(ns)
    for name, group in sorted(models.items()):
        if len(group) == 1:
            yield ok("sharing", f"{name}: one namespace ({group[0][:_NS_DIGITS]}): its engines share what they store")
        else:
            yield _apart(name, group, namespaces)
    for ns, num in sorted(tenants.items()):
        if num > 1:
            yield ok(
                "tenants",
                f"{ns[:_NS_DIGITS]}: {num} tenants: requests with another cache_salt share nothing, as they should",
            )


def _apart(name: str, group: Sequence[str], namespaces: Mapping[str, Namespace]) -> Finding:
    sentences, fields = [], []
    for first, second in list(pairwise(group))[:_MAX_SHOWN]:
        differing = differences(namespaces[first], namespaces[second])
        fields += [field for field, _, _ in differing]
        shown = ", ".join(f"{field} ({_short(a)} and {_short(b)})" for field, a, b in differing[:_MAX_SHOWN])
        sentences.append(f"{first[:_NS_DIGITS]} and {second[:_NS_DIGITS]} differ in {shown}")
    return warn(
        "sharing",
        f"{name}: {len(group)} namespaces, whose engines share nothing: {'; '.join(sentences)}",
        "if they should share: " + "; ".join(dict.fromkeys(_advice(field) for field in fields)),
    )


def differences(first: Namespace, second: Namespace) -> list[tuple[str, object, object]]:
    """Return (field, value of the first, value of the second) of all that keeps two namespaces apart."""
    left, right = _flat(msgspec.to_builtins(first)), _flat(msgspec.to_builtins(second))
    names = [name for name in dict.fromkeys([*left, *right]) if name != "model"]
    return [(n, left.get(n), right.get(n)) for n in names if left.get(n) != right.get(n)]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            found |= _flat(item, f"{prefix}{name}.")
        else:
            found[prefix + name] = item
    return found


def _short(value: object) -> str:
    if isinstance(value, list | tuple) and len(str(value)) > 40:
        return f"{len(value)} values, from {str(value[0])[:24]}"
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 16 else text[:12] + "..."


def _advice(field: str) -> str:
    return next(advice for start, advice in _ADVICE if field.startswith(start))
