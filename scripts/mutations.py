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


CONTRACT = "tests/engine/test_contract.py"
SCHEDULER = "connector/tierkv_connector/scheduler.py"
LOADS = "connector/tierkv_connector/loads.py"
PREFETCH = "connector/tierkv_connector/prefetch.py"
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
                "root = root_key(self.membership.identity, self._epoch_nonce, tenant)",
                "root = root_key(self.membership.identity, self._epoch_nonce)",
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
        PREFETCH,
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
                "        self.loads.request_finished(state)\n        self.prefetch.end(state)\n",
                "        self.loads.request_finished(state)\n",
            ),
        ),
        MACHINE,
    ),
    Mutation(
        "keep the pins of a load that has ended",
        LOADS,
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
        PREFETCH,
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
        LOADS,
        (("state.no_load = True", "pass"),),
        MACHINE,
    ),
    # Budgets
    Mutation(
        "start plans without looking at the budgets",
        PREFETCH,
        (("return len(self.plans) < MAX_PLANS and self.fetch_nbytes < PLAN_NBYTES", "return True"),),
        MACHINE,
    ),
    Mutation(
        "drop what is queued for a tier that is out for a moment",
        "server/tierkv_server/writer.py",
        (("return now < self._gives_up_at and not self.refusing", "return False"),),
        "tests/integration/test_writer.py::test_a_shared_tier_that_is_out_for_a_moment_loses_nothing_that_is_queued",
    ),
    Mutation(
        "wait for a tier that is out while the server leaves",
        "server/tierkv_server/writer.py",
        (("return now < self._gives_up_at and not self.refusing", "return now < self._gives_up_at"),),
        "tests/integration/test_writer.py::test_a_server_that_leaves_does_not_wait_for_it",
    ),
    Mutation(
        "wait for a tier that is out for ever",
        "server/tierkv_server/writer.py",
        (("self._gives_up_at = now + self._patience_s", "self._gives_up_at = now + 1e9"),),
        "tests/integration/test_writer.py::test_what_is_queued_for_one_that_stays_away_is_given_up",
    ),
    # vLLM's contract, rule by rule, and what it does to a running engine
    Mutation(
        "plan a request only when it is scheduled",
        PREFETCH,
        (
            (
                "        if self._may_start():\n            self._start(state, plan)\n        else:\n",
                "        if False:\n            self._start(state, plan)\n        else:\n",
            ),
        ),
        CONTRACT + "::test_01_the_question_is_asked_every_step_and_work_begins_before_it",
    ),
    Mutation(
        "claim the last token of a prompt",
        SCHEDULER,
        (
            (
                (
                    "        first = num_computed_tokens // size\n"
                    "        stop = min(len(state.keys), (request.num_tokens - 1) // size)\n"
                ),
                (
                    "        first = num_computed_tokens // size\n"
                    "        stop = min(len(state.keys), request.num_tokens // size)\n"
                ),
            ),
        ),
        CONTRACT + "::test_02_the_last_token_is_never_claimed",
    ),
    Mutation(
        "report no load that failed",
        "connector/tierkv_connector/worker.py",
        (
            (
                "                self._loaded.add(job.req_id)\n                if not done.ok:\n",
                (
                    "                if done.ok:\n"
                    "                    self._loaded.add(job.req_id)\n                if not done.ok:\n"
                ),
            ),
        ),
        CONTRACT + "::test_03_every_load_is_reported_once",
    ),
    Mutation(
        "keep the blocks of a request that ends",
        "connector/tierkv_connector/connector.py",
        (
            (
                "return False, self._sched.request_finished(request) if",
                "return True, self._sched.request_finished(request) if",
            ),
        ),
        CONTRACT + "::test_04_a_request_that_ends_keeps_no_blocks_of_ours",
    ),
    Mutation(
        "offer a failed load again and again",
        LOADS,
        (("            state.no_load = True\n", "            pass\n"),),
        CONTRACT + "::test_05_a_load_that_failed_is_not_offered_again",
    ),
    Mutation(
        "tell a failed load by its blocks, too",
        "connector/tierkv_connector/worker.py",
        (("if KVConnectorTransferResults is None:", "if True:"),),
        CONTRACT + "::test_06_a_failed_load_is_told_in_the_one_way_that_this_vllm_takes",
    ),
    Mutation(
        "fence nothing",
        SCHEDULER,
        (("fence = self._fence(scheduler_output, loads) if self.spill.copying else []", "fence: list[int] = [][:]"),),
        CONTRACT + "::test_07_blocks_that_are_given_out_again_are_fenced_and_the_null_block_is_nobodys",
    ),
    Mutation(
        "store a chunk before its end is computed",
        "connector/tierkv_connector/spill.py",
        (("end = min(len(state.keys), after // size)", "end = min(len(state.keys), -(-after // size))"),),
        CONTRACT + "::test_08_only_what_is_computed_is_stored",
    ),
    Mutation(
        "go on with the epoch after a reset",
        "connector/tierkv_connector/epochs.py",
        (("        self._begin(None if told is None else self._named(told), clean=gpu_is_empty)\n", ""),),
        CONTRACT + "::test_09_the_cache_is_reset_in_every_state",
    ),
    Mutation(
        "let an exception of ours reach vLLM",
        "connector/tierkv_connector/connector.py",
        (
            (
                "                self._break(method.__name__)\n                return default()\n",
                "                raise\n",
            ),
        ),
        CONTRACT + "::test_10_an_exception_of_ours_does_not_reach_vllm",
    ),
    Mutation(
        "let a device that takes no copies reach vLLM",
        "connector/tierkv_connector/worker.py",
        (
            (
                (
                    '                _faults.note("copies between the GPU and the host pool could '
                    'not be started", exc_info=True)\n'
                ),
                "                raise\n",
            ),
        ),
        CONTRACT + "::test_10_a_device_that_takes_no_copies_fails_them_and_nothing_else",
    ),
    Mutation(
        "store what was computed behind a load that failed",
        "connector/tierkv_connector/connector.py",
        (('if getattr(connector_output, "invalid_block_ids", None):', "if False:"),),
        CONTRACT + "::test_10_a_device_that_takes_no_copies_fails_them_and_nothing_else",
    ),
    Mutation(
        "keep an idle engine stepping for the store server",
        SCHEDULER,
        (("return bool(self.spill.copying)", "return bool(self.spill.copying or self.spill.queue.nbytes)"),),
        CONTRACT + "::test_11_an_idle_engine_is_kept_stepping_for_copies_on_the_device_only",
    ),
    Mutation(
        "take two of ours in one engine",
        "connector/tierkv_connector/connector.py",
        (("if other is not None and other._work is not None:", "if False:"),),
        CONTRACT + "::test_12_two_of_ours_are_refused_in_a_sentence",
    ),
    Mutation(
        "make keys of what Python hashes",
        "tierkv/keys.py",
        (
            (
                "parent = sha256(parent_head + parent + tokens_head + chunk).digest()",
                "parent = sha256(parent_head + parent + tokens_head + str(hash(chunk)).encode()).digest()",
            ),
        ),
        CONTRACT + "::test_13_keys_are_the_same_in_every_process",
    ),
    Mutation(
        "name a model by the sizes of its files",
        "tierkv/identity.py",
        (
            (
                "return {path.name: hashes.digest(path) for path in weights + configs}",
                "return {path.name: str(path.stat().st_size) for path in weights + configs}",
            ),
        ),
        CONTRACT + "::test_14_other_weights_at_the_same_path_are_another_model",
    ),
    Mutation(
        "overlook a change of weights",
        "connector/tierkv_connector/weights.py",
        (("    if may_change_weights(method):\n", "    if False:\n"),),
        "tests/engine/test_weights.py::test_an_update_in_place_cuts_off_all_that_was_stored",
    ),
    Mutation(
        "share a version while old KV is on the GPU",
        "connector/tierkv_connector/epochs.py",
        (
            (
                "        if gpu_is_empty:\n            self._told = None\n",
                "        if True:\n            self._told = None\n",
            ),
        ),
        "tests/unit/test_epochs.py::test_a_version_told_while_old_kv_is_on_the_gpu_waits_until_it_is_not",
    ),
    Mutation(
        "store behind KV of other weights",
        "connector/tierkv_connector/epochs.py",
        (("return self.number if self.clean else NO_EPOCH", "return self.number"),),
        "tests/engine/test_weights.py::test_an_update_in_place_cuts_off_all_that_was_stored",
    ),
    Mutation(
        "copy while the memory of the caches is gone",
        "connector/tierkv_connector/worker.py",
        (("        if not self._asleep:\n", "        if True:\n"),),
        "tests/unit/test_sleep.py::test_nothing_is_copied_while_the_memory_is_gone",
    ),
    Mutation(
        "go on with the old memory after a wake",
        "connector/tierkv_connector/worker.py",
        (("        self._device.rebind(self._regions(layout))\n", ""),),
        "tests/unit/test_sleep.py::test_what_is_copied_after_a_wake_is_the_new_memory",
    ),
    Mutation(
        "sleep while copies are under way",
        "connector/tierkv_connector/worker.py",
        (("        while self._num_copies:\n", "        while False:\n"),),
        "tests/unit/test_sleep.py::test_a_sleep_waits_for_the_copies_under_way",
    ),
    Mutation(
        "take an older answer of the file system",
        "connector/tierkv_connector/filecheck.py",
        (("any(q.name == name for q in stuck)", "False"),),
        "tests/unit/test_adapters.py::test_a_file_system_that_hangs_holds_nobody_up",
    ),
    Mutation(
        "load prefixes for means over prompts",
        "connector/tierkv_connector/compat.py",
        (
            (
                'return bool(cached and getattr(vllm_config.model_config, "is_prefix_caching_supported", False))',
                "return True",
            ),
        ),
        "tests/engine/test_pooling.py::test_only_what_vllm_itself_would_cache_is_loaded",
    ),
    # Kinds of KV and of engines
    Mutation(
        "store the state of a step that has not got there",
        "connector/tierkv_connector/recurrent.py",
        (("            if num_tokens <= end\n", "            if True\n"),),
        "tests/unit/test_recurrent.py::test_states_are_where_a_step_ends_and_where_vllm_says_so",
    ),
    Mutation(
        "store the null block as a state",
        "connector/tierkv_connector/recurrent.py",
        ((" and ids[num - 1] != NULL", ""),),
        "tests/unit/test_recurrent.py::test_states_are_where_a_step_ends_and_where_vllm_says_so",
    ),
    Mutation(
        "load the state of another boundary",
        "connector/tierkv_connector/blocks.py",
        (
            (
                "return [_NOTHING] * (len(chunks) - 1) + [Span(0, (ids[-1],))]",
                "return [_NOTHING] * (len(chunks) - 2) + [Span(0, (ids[-1],)), _NOTHING][-len(chunks) :]",
            ),
        ),
        "tests/unit/test_recurrent.py::test_of_a_claim_the_last_states_are_loaded",
    ),
    Mutation(
        "name an item without the options of its processor",
        "connector/tierkv_connector/digests.py",
        (("_spell([modality, fields, settings])", "_spell([modality, fields])"),),
        "tests/unit/test_extras.py::test_every_part_of_an_item_counts",
    ),
    Mutation(
        "trust a name that came with two contents",
        "connector/tierkv_connector/extras.py",
        (("            else:\n                self.trusted = False\n", "            else:\n                pass\n"),),
        "tests/unit/test_extras.py::test_a_name_with_two_contents_is_trusted_no_more",
    ),
    Mutation(
        "say that weights change once they have",
        "connector/tierkv_connector/weights.py",
        (("_before_rpc, before=True", "_before_rpc, before=False"),),
        "tests/unit/test_epochs.py::test_a_change_is_told_before_it_and_a_version_once_it_is_set",
    ),
    Mutation(
        "forget what hangs when another file is asked for",
        "connector/tierkv_connector/filecheck.py",
        (("self._under_way = {q.name: q for q in stuck}", "self._under_way = {}"),),
        "tests/unit/test_adapters.py::test_what_hangs_is_remembered_while_others_are_asked",
    ),
    Mutation(
        "promise past a chunk that is lost",
        "connector/tierkv_connector/handoff.py",
        (("next((i for i in range(num_chunks) if i not in promised), num_chunks)", "len(promised)"),),
        "tests/unit/test_handoff.py::test_an_answer_promises_up_to_the_first_that_is_lost",
    ),
    Mutation(
        "hand off what is private",
        "connector/tierkv_connector/handoff.py",
        (("return bool(entry.anchor) and entry.state == Entry.READY", "return entry.state == Entry.READY"),),
        "tests/unit/test_handoff.py::test_what_is_private_or_gone_is_not_sent",
    ),
    Mutation(
        "pass over holes in what is handed off",
        "connector/tierkv_connector/handoff.py",
        (("if s is not state or i != first + n", "if s is not state"),),
        "tests/unit/test_handoff.py::test_the_server_is_asked_for_runs_of_one_request_without_holes",
    ),
    Mutation(
        "share heads whose bytes lie in another order",
        "connector/tierkv_connector/portable.py",
        (("order=tuple(axis for axis in group.order if axis != 1)", "order=()"),),
        "tests/unit/test_portable.py::test_the_order_within_a_head_is_a_part_of_the_layout",
    ),
    Mutation(
        "give every stage the parts of the first",
        "connector/tierkv_connector/portable.py",
        (
            (
                "return stage * (self.num_parts // self.num_stages) + rank // self.replicas",
                "return rank // self.replicas",
            ),
        ),
        "tests/unit/test_ranks.py::test_a_payload_is_the_parts_of_all_stages",
    ),
    Mutation(
        "take one format of quantized KV for another",
        "connector/tierkv_connector/caches.py",
        (("return quantized_format(layer) or str(", "return str("),),
        "tests/unit/test_caches.py::test_formats_of_quantized_kv_are_told_apart",
    ),
    Mutation(
        "take quantized KV for packed as its elements are",
        "connector/tierkv_connector/caches.py",
        (("dtype = vllm_config.model_config.dtype", "dtype = cache.dtype"),),
        "tests/unit/test_caches.py::test_quantized_kv_is_packed_for_the_type_of_the_model",
    ),
    Mutation(
        "leave a quantization out of the identity",
        "connector/tierkv_connector/model.py",
        (('_plain(_fields_of(getattr(model, "quantization_config", None)))', "None"),),
        "tests/unit/test_model.py::test_a_setting_that_changes_the_kv_changes_the_identity",
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
