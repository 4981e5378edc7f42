"""What the connector costs vLLM's scheduler thread: planning a long prompt, answering for it again, and a step.

For models of one KV cache group and of several, and for chunks as the default chooses them: the scheduler half with
vLLM's own block pool, where the prompt is known to be stored nowhere, where the store server is asked, where it is in
the host pool, and on the GPU. Nothing is copied, and no other process takes part.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from scheduler_cost import Half, Prompt, Shape

NUM_TOKENS = 131_072
NUM_RUNNING = 256
#: Milliseconds. A chunk of 32 tokens is the default at 128 KiB of KV a token (a model of 8 billion parameters).
BARS = {"plan": 5.0, "again": 1.0, "step": 1.0}
#: Below this many tokens a chunk (more than 128 KiB of KV a token) the bar of planning is not held: see the guide.
BAR_CHUNK_TOKENS = 32
SHAPES = tuple(Shape(groups, tokens) for groups in (1, 7) for tokens in (16, 32, 64, 256))


class Case(NamedTuple):
    """Where a prompt is.

    Attributes:
        name: of the row.
        prepare: brings it there.
    """

    name: str
    prepare: Callable[[Half, Prompt], None]


CASES = (
    Case("a miss, by the filter", lambda half, prompt: half.deny_all()),
    Case("asked for", lambda half, prompt: None),
    Case("host", lambda half, prompt: half.put_in_host(prompt)),
    Case("GPU", lambda half, prompt: half.put_on_gpu(prompt)),
    Case("GPU, its windows gone", lambda half, prompt: half.put_on_gpu(prompt, groups=[0])),
)


class Figure(NamedTuple):
    """What was measured of one shape and case, in milliseconds: the median of the repeats, and the best."""

    groups: int
    chunk_tokens: int
    case: str
    plan: float
    plan_best: float
    again: float
    again_best: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench-scheduler", description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--running", type=int, default=NUM_RUNNING, help="requests of a step (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    if args.tokens < 256 or args.running < 1 or args.repeats < 1:
        parser.error("--tokens is at least 256, --running and --repeats at least 1")
    return args


@contextmanager
def half_of(shape: Shape, num_slots: int, gpu_blocks: int) -> Iterator[Half]:
    half = Half(shape, num_slots, gpu_blocks)
    try:
        yield half
    finally:
        half.close()


def measure(action: Callable[[], Any]) -> float:
    """Return how many milliseconds of this thread's time it takes: others that use the machine are not counted."""
    began = time.thread_time()
    action()
    return 1000 * (time.thread_time() - began)


def plan_and_ask(shape: Shape, case: Case, num_tokens: int, repeats: int) -> Figure:
    """Measure a new request with its first answer, and an answer after that."""
    stored = Prompt.make(num_tokens, 0)
    num_chunks = num_tokens // shape.chunk_tokens
    plans, again = [], []
    with half_of(shape, 2 * num_chunks + 64, shape.num_groups * len(stored.block_hashes) + 2) as half:
        case.prepare(half, stored)
        for i in range(repeats):
            prompt = stored.again() if case.name not in ("asked for", "a miss, by the filter") else None
            request = prompt or Prompt.make(num_tokens, i + 1)
            plans.append(measure(lambda request=request: (half.add(request), half.ask(request))))
            again.append(measure(lambda request=request: half.ask(request)))
            half.finish(request)
            half.answer(b".")
            half.step([])
    return Figure(
        shape.num_groups, shape.chunk_tokens, case.name,
        statistics.median(plans), min(plans), statistics.median(again), min(again),
    )  # fmt: skip


def step_cost(shape: Shape, num_running: int, repeats: int) -> tuple[float, float]:
    """Return the median and the best time of the metadata of a step in which every request generates a token."""
    num_tokens = 2048
    prompts = [Prompt.make(num_tokens, i) for i in range(num_running)]
    with half_of(shape, num_running * (num_tokens // shape.chunk_tokens) + 64, 1 << 14) as half:
        half.deny_all()
        for prompt in prompts:
            half.add(prompt)
        half.copied(half.step([(prompt, 0, num_tokens) for prompt in prompts]).stores)
        output = half.output([(prompt, num_tokens, 1) for prompt in prompts])
        times = [measure(lambda: half.sched.build_connector_meta(output)) for _ in range(4 * repeats)]
    return statistics.median(times), min(times)


def show(console: Console, figures: list[Figure], steps: dict[Shape, tuple[float, float]], args: Any) -> None:
    table = Table(title=f"a prompt of {args.tokens:,} tokens; milliseconds, the median of {args.repeats} (the best)")
    for name in ("groups", "chunk", "the prompt is", "planned and first answer", "each answer after that"):
        table.add_column(name, justify="left" if name == "the prompt is" else "right")
    for f in figures:
        plan, again = f"{f.plan:.2f} ({f.plan_best:.2f})", f"{f.again:.3f} ({f.again_best:.3f})"
        table.add_row(str(f.groups), str(f.chunk_tokens), f.case, plan, again)
    console.print(table)
    for shape, (median, best) in steps.items():
        console.print(
            f"a step of {args.running} running requests, {shape.num_groups} KV cache groups: "
            f"{median:.2f} ms ({best:.2f})"
        )


def missed_bars(figures: list[Figure], steps: dict[Shape, tuple[float, float]]) -> list[str]:
    """Return a sentence for every bar that is missed, by the best of the repeats: the machine may be busy."""
    missed = []
    for f in figures:
        where = f"{f.groups} groups, chunks of {f.chunk_tokens} tokens, {f.case}"
        if f.chunk_tokens >= BAR_CHUNK_TOKENS and f.plan_best >= BARS["plan"]:
            missed.append(f"{where}: planning takes {f.plan_best:.2f} ms; the bar is {BARS['plan']:g}")
        if f.again_best >= BARS["again"]:
            missed.append(f"{where}: an answer takes {f.again_best:.2f} ms; the bar is {BARS['again']:g}")
    for shape, (_, best) in steps.items():
        if best >= BARS["step"]:
            missed.append(f"{shape.num_groups} groups: a step takes {best:.2f} ms; the bar is {BARS['step']:g}")
    return missed


def main() -> int:
    """Run the benchmark; exit status 1 if a bar is missed."""
    args = parse_arguments()
    console = Console(width=120)
    gc.freeze()  # as vLLM does
    figures = [plan_and_ask(shape, case, args.tokens, args.repeats) for shape in SHAPES for case in CASES
               if shape.num_groups > 1 or "windows" not in case.name]  # fmt: skip
    steps = {shape: step_cost(shape, args.running, args.repeats) for shape in SHAPES if shape.chunk_tokens == 32}
    show(console, figures, steps, args)
    missed = missed_bars(figures, steps)
    if args.json:
        result = {
            "tokens": args.tokens,
            "running": args.running,
            "bars_ms": BARS,
            "plans": [f._asdict() for f in figures],
            "steps": [{"groups": s.num_groups, "median": m, "best": b} for s, (m, b) in steps.items()],
            "missed": missed,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    for sentence in missed:
        console.print(f"[red]missed[/red] {sentence}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
