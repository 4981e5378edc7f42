"""Faults of our own making: each is planted in a copy of the sources, and the test named for it has to fail.

A test that cannot fail proves nothing. This shows for each class of faults that would give wrong bytes, leak slots or
hang an engine that a named test sees it. The repository itself is never changed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What a test needs of the repository.
COPIED = ("tierkv", "server", "connector", "tests", "scripts", "pyproject.toml")
TIMEOUT_S = 300.0

MACHINE = "tests/unit/test_plan_machine.py::test_the_machine_and_the_reference_agree"
RACES = "tests/integration/test_pool_races.py::test_no_byte_is_wrong"


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: what it does, in words.
        path: the file that it is planted in.
        edits: what is replaced by what; each original stands there exactly once.
        test: the test that must fail, as pytest names it.
    """

    name: str
    path: str
    edits: tuple[tuple[str, str], ...]
    test: str


SCHEDULER = "connector/tierkv_connector/scheduler.py"
MUTATIONS = (
    # Wrong bytes
    Mutation(
        "skip the generation check after a copy out of a slot",
        "tierkv/pool.py",
        (("        return int(self.generations[slot]) == generation\n", "        return True\n"),),
        RACES,
    ),
    Mutation(
        "do not raise the generation of a slot that is used again",
        "tierkv/hostindex.py",
        (("generation = int(self.pool.generations[slot]) + 1", "generation = int(self.pool.generations[slot])"),),
        RACES,
    ),
    Mutation(
        "serve an unverified payload of the disk",
        "tierkv/tiers/environment.py",
        (("if header is None or digest.digest() != header.checksum:", "if header is None:"),),
        "tests/integration/test_tiers.py::test_a_flipped_bit_is_a_miss_deleted_and_counted",
    ),
    Mutation(
        "serve an unverified payload of the shared tier",
        "tierkv/tiers/redis_transfer.py",
        (("if digest.digest() != header.checksum:", "if False:"),),
        "tests/integration/test_tiers.py::test_a_flipped_bit_is_a_miss_deleted_and_counted",
    ),
    Mutation(
        "claim a chunk that is still on its way",
        "tierkv/hostindex.py",
        (('return fetch.results[self.fetch_index] in b"ds"', "return True"),),
        MACHINE,
    ),
    Mutation(
        "send no fence with blocks that are given out again",
        SCHEDULER,
        (("fence = self._fence(scheduler_output, loads) if self.spill.copying else []", "fence: list[int] = []"),),
        MACHINE,
    ),
    Mutation(
        "ignore what an operator has dropped",
        "tierkv/hostindex.py",
        (("or (dropped and keys[i] in dropped)", ""),),
        MACHINE,
    ),
    Mutation(
        "leave the tenant out of the key",
        SCHEDULER,
        (
            (
                "root = root_key(self._identity, self._epoch_nonce, tenant)",
                "root = root_key(self._identity, self._epoch_nonce)",
            ),
        ),
        "tests/unit/test_scheduler_half.py::test_tenants_do_not_see_each_other",
    ),
    Mutation(
        "apply a late reply to an entry that has gone",
        "tierkv/hostindex.py",
        (
            (
                "        if entry.state == Entry.FILLING:\n            entry.source = source\n",
                "        if entry.state != Entry.READY:\n            entry.source = source\n",
            ),
        ),
        MACHINE,
    ),
    # Slots
    Mutation(
        "free a leased slot when its fetch is given up",
        SCHEDULER,
        (("if not fetch.applied or not fetch.released:", "if not fetch.applied:"),),
        RACES,
    ),
    Mutation(
        "end the leases with the session",
        "tierkv/client.py",
        (
            (
                "            self._old_leases[session.lease] = leased\n            return\n",
                "            self._old_leases[session.lease] = leased\n",
            ),
        ),
        RACES,
    ),
    Mutation(
        "free the slot of a dropped chunk at once",
        "tierkv/hostindex.py",
        (("        if filling or entry.num_pins:\n", "        if entry.num_pins:\n"),),
        RACES,
    ),
    Mutation(
        "keep the leases of a request that is aborted",
        SCHEDULER,
        (
            (
                "            self._ended_loads[request.request_id] = state.load\n        self._end_plan(state)\n",
                "            self._ended_loads[request.request_id] = state.load\n",
            ),
        ),
        MACHINE,
    ),
    Mutation(
        "keep the pins of a load that has ended",
        SCHEDULER,
        (("        self._unpin(entries or ())\n        if failed:\n", "        if failed:\n"),),
        MACHINE,
    ),
    # Waiting
    Mutation(
        "touch recency in the question that vLLM asks",
        SCHEDULER,
        (
            (
                "        num_tokens = end * size - num_computed_tokens\n",
                "        num_tokens = end * size - num_computed_tokens\n        self.index.touch(state.keys[:end])\n",
            ),
        ),
        MACHINE,
    ),
    Mutation(
        "let a match renew the life of what it finds",
        "tierkv/tiers/disk.py",
        (
            (
                "        return self._catalog.stored(env, refs)\n",
                "        found = [(r.key, e) for r, e in zip(refs, self._catalog.find(env, refs), strict=True) if e]\n"
                "        self._catalog.note_use(env, found)\n"
                "        return self._catalog.stored(env, refs)\n",
            ),
        ),
        "tests/integration/test_tiers.py::test_asking_touches_nothing",
    ),
    Mutation(
        "ignore the deadline of a plan",
        "connector/tierkv_connector/plan.py",
        (
            (
                "if self.state not in (State.MATCHING, State.FETCHING) or now >= self.deadline:",
                "if self.state not in (State.MATCHING, State.FETCHING):",
            ),
        ),
        MACHINE,
    ),
    Mutation(
        "wait for what comes after a chunk that another's fetch did not bring",
        SCHEDULER,
        (
            (
                "e.position for e in plan.shared_waits if e.state == Entry.GONE",
                "e.position for e in plan.shared_waits if False",
            ),
        ),
        "tests/unit/test_plan_machine.py"
        "::test_what_follows_a_chunk_that_anothers_fetch_did_not_bring_is_not_waited_for",
    ),
    Mutation(
        "leave a plan under way as it is when the request's prefix leaves the GPU",
        SCHEDULER,
        (
            (
                "plan.state in (State.LOADING, State.DONE) or not plan.gpu_run",
                "plan.state is not State.READY or not plan.gpu_run",
            ),
        ),
        "tests/unit/test_plan_machine.py"
        "::test_a_prefix_that_leaves_the_gpu_while_its_plan_is_under_way_is_planned_again",
    ),
    # Reports
    Mutation(
        "forget to report a load that failed",
        "connector/tierkv_connector/worker.py",
        (
            (
                "                self._loaded.add(job.req_id)\n",
                "                self._loaded.update([job.req_id] if done.ok else [])\n",
            ),
        ),
        "tests/unit/test_plan_machine.py::test_each_load_is_reported_once",
    ),
    Mutation(
        "report a load twice",
        "connector/tierkv_connector/worker.py",
        (("        loaded, self._loaded = self._loaded, set()\n", "        loaded = set(self._loaded)\n"),),
        "tests/unit/test_plan_machine.py::test_each_load_is_reported_once",
    ),
    Mutation(
        "offer a request the load that failed again",
        SCHEDULER,
        (("state.no_load = True", "pass"),),
        MACHINE,
    ),
    # Budgets
    Mutation(
        "start plans without looking at the budgets",
        SCHEDULER,
        (("return len(self._plans) < MAX_PLANS and self._fetch_nbytes < PLAN_NBYTES", "return True"),),
        MACHINE,
    ),
)


class CannotPlantError(Exception):
    """A mutation's original text is not in its file, or not once."""


def mutated(source: str, mutation: Mutation) -> str:
    """Return a file's text with the fault in it.

    Raises:
        CannotPlantError: the text has changed since the fault was written down.
    """
    for old, new in mutation.edits:
        if source.count(old) != 1:
            raise CannotPlantError(
                f"the fault {mutation.name!r} cannot be planted: {mutation.path} has {source.count(old)} times "
                f"{old.strip()!r}, and it has to stand there once; write the fault down anew in scripts/mutations.py"
            )
        source = source.replace(old, new)
    return source


class Copy:
    """A copy of the repository in which faults are planted.

    Args:
        directory: where it is made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, directory / name)

    @contextlib.contextmanager
    def planted(self, mutation: Mutation) -> Iterator[None]:
        """Have a fault in the copy within the block.

        Raises:
            CannotPlantError: it cannot be planted.
        """
        path = self._directory / mutation.path
        source = path.read_text()
        path.write_text(mutated(source, mutation))
        try:
            yield
        finally:
            path.write_text(source)

    def fails(self, tests: Sequence[str]) -> tuple[bool, str]:
        """Run tests in the copy, and return whether one failed, and the end of what was said.

        Raises:
            RuntimeError: they could not be run.
        """
        paths = [str(self._directory / part) for part in ("", "server", "connector", "tests")]
        quick = {"PYTHONDONTWRITEBYTECODE": "1", "TIERKV_NO_SHRINKING": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=self._directory,
                env=os.environ | quick | {"PYTHONPATH": os.pathsep.join(paths)},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return True, f"the test was still running after {TIMEOUT_S:g} s"
        said = (done.stdout + done.stderr)[-3000:]
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{said}")
        return done.returncode == 1, said


def check(mutations: Sequence[Mutation], directory: Path) -> list[str]:
    """Plant each fault and run its test; prints a line each, and returns what is wrong, as sentences."""
    copy, problems = Copy(directory), []
    tests = sorted({mutation.test for mutation in mutations})
    print(f"{len(mutations)} faults; first the {len(tests)} tests without any ...", flush=True)
    failed, said = copy.fails(tests)
    if failed:
        return [f"a test fails without any fault planted:\n{said}"]
    width = max(len(mutation.name) for mutation in mutations)
    print(f"{'fault':{width}}  verdict   seconds  test", flush=True)
    for mutation in mutations:
        started = time.monotonic()
        try:
            with copy.planted(mutation):
                killed, _ = copy.fails([mutation.test])
            verdict = "killed" if killed else "survived"
        except CannotPlantError as error:
            verdict, killed = "error", True
            problems.append(str(error))
        if not killed:
            problems.append(f"{mutation.test} passes although the sources {mutation.name}")
        print(f"{mutation.name:{width}}  {verdict:8}  {time.monotonic() - started:7.1f}  {mutation.test}", flush=True)
    return problems


def select(words: Sequence[str]) -> list[Mutation]:
    """Return the mutations whose names contain one of ``words``; all for none."""
    return [m for m in MUTATIONS if not words or any(word in m.name for word in words)]


def main() -> int:
    """Check from the command line; exit status 1 where a fault survived or could not be planted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help="faults whose names contain this")
    parser.add_argument("--list", action="store_true", help="say which there are")
    args = parser.parse_args()
    chosen = select(args.only)
    if not chosen:
        parser.error(f"no fault is named like {args.only}; see --list")
    if args.list:
        for mutation in chosen:
            print(f"{mutation.name}\n    {mutation.path}, {mutation.test}")
        return 0
    with tempfile.TemporaryDirectory(prefix="tkv-mutations-") as directory:
        problems = check(chosen, Path(directory))
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(problems)} problems" if problems else f"all {len(chosen)} faults were seen", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
