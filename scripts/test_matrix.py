"""Run the engine tests on several versions of vLLM and print a table of what passed.

    scripts/test-matrix [--versions V,...] [--tests ROW,...] [--json FILE] [--write]

A row of the table is a group of tests, a column a version. Each version's engines are real ones, of the environment's
vLLM or of a folder that :mod:`vllm_versions` unpacks. Exits with 1 where a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import vllm_versions

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- scripts/test-matrix --write: begin -->", "<!-- end -->"
TIMEOUT_S = 3600


class Row(NamedTuple):
    """Tests that share a row.

    Attributes:
        name: as ``--tests`` and the table have it.
        files: where they are, below ``tests/engine``.
        pattern: what their names match.
    """

    name: str
    files: tuple[str, ...]
    pattern: str


#: A test is counted in the first row whose pattern it matches. docs/compatibility.md says what each row shows.
ROWS = (
    Row(
        "equality-host",
        ("test_equality.py",),
        r"(equals_a_gpu_hit|same_bytes_are_on_the_gpu).*-host\]|same_bytes_are_in",
    ),
    Row("equality-disk", ("test_equality.py",), r"(equals_a_gpu_hit|same_bytes_are_on_the_gpu).*-disk\]"),
    Row("equality-shared", ("test_equality.py",), r"(equals_a_gpu_hit|same_bytes_are_on_the_gpu).*-shared\]"),
    Row("negative-control", ("test_equality.py",), r"one_wrong_exponent_bit|distinct_prompts"),
    Row("abort", ("test_lifecycle.py",), r"aborting"),
    Row("preemption", ("test_waiting.py", "test_churn.py"), r"preempted|churn"),
    Row("load-failure", ("test_versions.py",), r"failed_load|load_that_cannot_be_planned"),
    Row("reset", ("test_lifecycle.py",), r"reset"),
    Row("lifecycle", ("test_lifecycle.py",), r"."),
    Row("interface", ("test_versions.py",), r"."),
    Row("observability", ("test_observability.py",), r"."),
    Row("contract", ("test_contract.py",), r"."),
    Row("roles", ("test_roles.py",), r"."),
    Row("weights", ("test_weights.py",), r"."),
    Row("adapters", ("test_adapters.py",), r"."),
    Row("multimodal", ("test_multimodal.py",), r"."),
    Row("pooling", ("test_pooling.py",), r"."),
    Row("groups", ("test_groups.py",), r"."),
    Row("recurrent", ("test_recurrent.py",), r"."),
    Row("quantized", ("test_quantized.py",), r"."),
    Row("ranks", ("test_ranks.py",), r"."),
    Row("small-loads", ("test_sync_loads.py",), r"."),
    Row("steps", ("test_steps.py",), r"."),
    Row("stress", ("test_stress.py",), r"."),
)


class Cell(NamedTuple):
    """What a row's tests did on one version."""

    passed: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        if not self.passed + self.failed:
            return "–"
        return f"{self.passed}" if not self.failed else f"**{self.failed} of {self.passed + self.failed} failed**"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test-matrix", description=__doc__.partition("\n")[0])
    parser.add_argument("--versions", default=",".join(vllm_versions.ALL), help="separated by commas (default: all)")
    parser.add_argument("--tests", default=",".join(row.name for row in ROWS), help="rows of the table (default: all)")
    parser.add_argument("--json", type=Path, help="file for the results; others that it has stay")
    parser.add_argument("--write", action="store_true", help="put the table into docs/compatibility.md")
    args = parser.parse_args()
    args.versions, args.tests = args.versions.split(","), args.tests.split(",")
    if unknown := set(args.versions) - set(vllm_versions.ALL):
        parser.error(f"--versions: {', '.join(sorted(unknown))} is none of {', '.join(vllm_versions.ALL)}")
    if unknown := set(args.tests) - {row.name for row in ROWS}:
        parser.error(f"--tests: {', '.join(sorted(unknown))} is none of {', '.join(row.name for row in ROWS)}")
    if args.write and len(args.tests) < len(ROWS):
        parser.error("--write: the document has the whole table; leave --tests out")
    return args


def load(path: Path | None) -> dict[str, dict[str, Cell]]:
    """Return the results of a file that an earlier run has written."""
    if path is None or not path.exists():
        return {}
    return {v: {name: Cell(**cell) for name, cell in row.items()} for v, row in json.loads(path.read_text()).items()}


def save(path: Path | None, results: dict[str, dict[str, Cell]]) -> None:
    if path is not None:
        columns = {v: {name: cell._asdict() for name, cell in column.items()} for v, column in results.items()}
        path.write_text(json.dumps(columns, indent=2) + "\n")


def row_of(file: str, name: str) -> Row | None:
    """Return the row of a test."""
    return next((row for row in ROWS if file in row.files and re.search(row.pattern, name)), None)


def collect(version: str, tests: list[str]) -> list[str]:
    """Return the ids of the tests of some rows, as a version has them: some models run on later ones only."""
    files = sorted({f"tests/engine/{file}" for row in ROWS if row.name in tests for file in row.files})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *files]
    env = os.environ | {vllm_versions.VARIABLE: version}
    listed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if listed.returncode:
        sys.exit(listed.stdout + listed.stderr)
    found = []
    for line in listed.stdout.splitlines():
        path, _, name = line.partition("::")
        row = row_of(Path(path).name, name) if name else None
        if row is not None and row.name in tests:
            found.append(line)
    return found


def run(version: str, ids: list[str]) -> tuple[dict[str, Cell], str]:
    """Run tests on a version, and return its column by row, and what pytest said where a test failed."""
    env = os.environ | {vllm_versions.VARIABLE: version}
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        args = ["-q", "--tb=short", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}", *ids]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *args],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        if done.returncode not in (0, 1) or not report.exists():  # the others: it could not run as it was called
            sys.exit(f"pytest did not run with vLLM {version}:\n{done.stdout}{done.stderr}")
        column = read_report(report)
    return column, "" if not done.returncode else done.stdout


def read_report(report: Path) -> dict[str, Cell]:
    """Return a column by row from pytest's report."""
    column: dict[str, Cell] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        row = row_of(Path(case.get("file", "")).name, case.get("name", ""))
        if row is None:
            continue
        states = {child.tag for child in case}
        failed, skipped = bool(states & {"failure", "error"}), "skipped" in states
        old = column.get(row.name, Cell(0, 0, 0))
        added = Cell(not failed and not skipped, failed, skipped and not failed)
        column[row.name] = Cell(*(a + b for a, b in zip(old, added, strict=True)))
    return column


def table(results: dict[str, dict[str, Cell]]) -> str:
    """Return the results as a table in Markdown."""
    rows = [row.name for row in ROWS if any(row.name in column for column in results.values())]
    lines = ["| | " + " | ".join(results) + " |", "|---|" + "--:|" * len(results)]
    for name in rows:
        cells = (column.get(name, Cell(0, 0, 0)) for column in results.values())
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def environment() -> str:
    """Return what the versions of vLLM ran with, in a line."""
    today = datetime.datetime.now(datetime.UTC).date()
    return f"Run on {today:%-d %B %Y} with Python {platform.python_version()} and torch {metadata.version('torch')}."


def write(text: str) -> None:
    """Put the table into the document, in place of the one that is there."""
    document = DOCUMENT.read_text()
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


def main() -> int:
    """Run what the arguments ask for."""
    args = parse_arguments()
    results = load(args.json)
    for version in args.versions:
        vllm_versions.engine_env(version)  # unpacked before the clock starts
        began, ids = time.monotonic(), collect(version, args.tests)
        column, said = run(version, ids)
        results[version] = results.get(version, {}) | column
        num_failed = sum(cell.failed for cell in column.values())
        took = f"{time.monotonic() - began:.0f} s"
        print(f"vLLM {version}: {num_failed} of {len(ids)} failed, {took}\n{said}", file=sys.stderr, flush=True)
        save(args.json, results)
    results = {version: results[version] for version in vllm_versions.ALL if version in results}
    print(text := f"{table(results)}\n\n{environment()}")
    if args.write and len(results) < len(vllm_versions.ALL):
        sys.exit("--write: the document has all versions; run the others too (--json keeps what there is)")
    if args.write:
        write(text)
    return any(cell.failed for column in results.values() for cell in column.values())


if __name__ == "__main__":
    sys.exit(main())
