"""Proves the CUDA backend on a machine that has a GPU: bytes, order, and speed.

Every check goes through what the worker half of the connector uses (:mod:`tierkv_connector.cuda`), with tensors in the
place of a model. *Equality*: KV of every physical layout is stored, wiped and loaded to other blocks while the GPU
computes. *Order*: blocks are rewritten right behind a store, zeroed right before a load, read right behind one, all
queued behind a busy compute stream; each wait that makes this right is then left out, and the bytes must be wrong, or
the check could not have failed. *Waking*: what was stored from caches that are gone is loaded to those that came in
their place, as after vLLM has slept; without rebinding it must not come there. *Speed*: what a batch of copies reaches,
against a single copy of as many bytes between pinned memory and the GPU, timed in the same run by the GPU's clock.
Last, where vLLM is installed, a real engine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tierkv.pool import PoolShape, Segment
from tierkv_connector.cuda import BatchMover, CudaDevice, GatherMover, OpenMover, batch_copy
from tierkv_connector.device import Region, block_matrix, make_regions, words
from tierkv_connector.jobs import LoadJob, Piece, StoreJob

NUM_HEADS, BLOCK_TOKENS, WIDTH = 4, 16, 256
#: 8-byte words of a block of one layer in the checks of order: a chunk is 8 MiB, which takes a while to copy.
ORDER_WORDS = 1 << 16
NO_GPU = 2
TIMEOUT_S = 60.0


@dataclass
class Row:
    """One line of the table. ``ok`` is None where there is nothing to pass."""

    check: str
    what: str
    value: str
    ok: bool | None


class Gpu:
    """The machine, as the checks use it.

    Args:
        device: torch's name of it.
        movers: by name, how copies are made there.
    """

    def __init__(self, device: str = "cuda", movers: dict[str, OpenMover] | None = None) -> None:
        self.device = torch.device(device)
        self.movers = _movers() if movers is None else movers

    def submit(self, work: Callable[[], object]) -> None:
        """Queue work on the compute stream."""
        work()

    def keep_busy(self) -> None:
        """Queue work of some ten milliseconds on the compute stream: a spin, then multiplications."""
        torch.cuda._sleep(20_000_000)
        a = torch.ones(4096, 4096, device=self.device, dtype=torch.bfloat16)
        for _ in range(8):
            a = a @ a

    def pause(self) -> None:
        """Let it work for a moment."""
        time.sleep(0.0005)

    def synchronize(self) -> None:
        """Wait for everything."""
        torch.cuda.synchronize(self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)


def _movers() -> dict[str, OpenMover]:
    copy = batch_copy()
    movers: dict[str, OpenMover] = {}
    if copy is not None:
        movers["batch"] = lambda regions, shape, segment: BatchMover(regions, shape, segment, copy)
    movers["gather"] = GatherMover
    return movers


# -- layouts: how a model's layers may stand in memory


class Kind(NamedTuple):
    """A physical layout: makes [blocks, heads, tokens, width] of some layers; ``by_heads``: regions are of KV heads."""

    make: Callable[[int, int, torch.device], list[torch.Tensor]]
    by_heads: bool = False


def _heads_outside(layers: int, blocks: int, device: torch.device) -> list[torch.Tensor]:
    return [
        torch.zeros(blocks, NUM_HEADS, BLOCK_TOKENS, WIDTH, dtype=torch.bfloat16, device=device) for _ in range(layers)
    ]


def _tokens_outside(layers: int, blocks: int, device: torch.device) -> list[torch.Tensor]:
    shape = blocks, BLOCK_TOKENS, NUM_HEADS, WIDTH
    return [torch.zeros(shape, dtype=torch.bfloat16, device=device).permute(0, 2, 1, 3) for _ in range(layers)]


def _together(layers: int, blocks: int, device: torch.device) -> list[torch.Tensor]:
    shape = blocks, layers, NUM_HEADS, BLOCK_TOKENS, WIDTH
    return list(torch.zeros(shape, dtype=torch.bfloat16, device=device).unbind(1))


def _latents(layers: int, blocks: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(blocks, BLOCK_TOKENS, 576, dtype=torch.bfloat16, device=device) for _ in range(layers)]


KINDS = {
    "heads outside tokens": Kind(_heads_outside),
    "tokens outside heads": Kind(_tokens_outside),
    "layers in one allocation": Kind(_together),
    "latents": Kind(_latents),
    "portable, heads outside": Kind(_heads_outside, by_heads=True),
    "portable, tokens outside": Kind(_tokens_outside, by_heads=True),
}


def regions_of(kind: Kind, caches: Sequence[torch.Tensor], per_chunk: int) -> list[Region]:
    """Return the regions of one block table: of layers, or as ``portable_ranks`` has them of each KV head's."""
    if not kind.by_heads:
        return make_regions(caches, caches[0].shape[0], per_chunk)
    regions: list[Region] = []
    offset = 0
    for head in range(NUM_HEADS):
        for cache in caches:
            rows = words(cache[:, head], offset)
            regions.append(Region(rows, offset, rows[0].numel() * rows.element_size(), per_chunk, 0))
            offset += regions[-1].nbytes
    return regions


@contextmanager
def opened(gpu: Gpu, regions: Sequence[Region], num_slots: int, mover: str) -> Iterator[tuple[CudaDevice, Segment]]:
    """Yield a device over a pinned pool of ``num_slots``, and its segment."""
    shape = PoolShape(num_slots, 1, sum(region.nbytes for region in regions))
    segment = Segment.create(shape.segment_nbytes(0))
    device = CudaDevice(regions, shape, segment, gpu.movers[mover])
    try:
        yield device, segment
    finally:
        gpu.synchronize()
        device.close()
        segment.close()


def wait(gpu: Gpu, device: CudaDevice, num: int) -> list[Any]:
    """Return ``num`` finished copies.

    Raises:
        TimeoutError: they do not finish.
        RuntimeError: one has failed.
    """
    done: list[Any] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(done) < num:
        done += device.finished()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{num - len(done)} of {num} copies did not finish in {TIMEOUT_S:.0f} s")
        gpu.pause()
    if not all(each.ok for each in done):
        raise RuntimeError("a copy could not be started")
    return done


# -- equality


def wrong_bytes(gpu: Gpu, kind: Kind, mover: str, *, layers: int = 4, blocks: int = 64, per_chunk: int = 4) -> int:
    """Store all blocks, wipe them, load them to other blocks, while the GPU computes; return the bytes that differ."""
    rng = random.Random(1)
    caches = kind.make(layers, blocks, gpu.device)
    rows = [block_matrix(cache, blocks) for cache in caches]
    for number, matrix in enumerate(rows):
        matrix.random_(generator=torch.Generator(gpu.device).manual_seed(number))
    gpu.synchronize()
    sources, targets = (rng.sample(range(blocks), blocks) for _ in range(2))
    expected = [matrix.clone() for matrix in rows]
    for before, matrix in zip(expected, rows, strict=True):
        before[targets] = matrix[sources]
    num = blocks // per_chunk
    runs = [slice(i * per_chunk, (i + 1) * per_chunk) for i in range(num)]
    with opened(gpu, regions_of(kind, caches, per_chunk), num, mover) as (device, _):
        gpu.keep_busy()
        device.store([StoreJob(i, Piece(i, 0, tuple(sources[runs[i]]))) for i in range(num)])
        device.fence(sources)
        for matrix in rows:
            gpu.submit(matrix.zero_)
        wait(gpu, device, num)
        gpu.keep_busy()
        pieces = [Piece(i, 0, tuple(targets[runs[i]])) for i in range(num)]
        device.load([LoadJob("a", tuple(pieces[: num // 2])), LoadJob("b", tuple(pieces[num // 2 :]))])
        wait(gpu, device, 2)
        gpu.synchronize()
    return sum(
        int((got.view(torch.uint8) != want.view(torch.uint8)).sum()) for got, want in zip(rows, expected, strict=True)
    )


def check_equality(gpu: Gpu) -> Iterator[Row]:
    """Yield a row for each layout and way to copy."""
    for name, kind in KINDS.items():
        for mover in gpu.movers:
            if mover == "batch" and any(r.cache.dim() > 2 for r in regions_of(kind, kind.make(1, 2, gpu.device), 1)):
                continue  # rows in many pieces never go that way
            wrong = wrong_bytes(gpu, kind, mover)
            yield Row("equality", f"{name}, {mover}", f"{wrong} wrong bytes", wrong == 0)


# -- order


def _no_fence(device: CudaDevice) -> None:
    device.fence = lambda block_ids: None  # type: ignore[method-assign]


def _no_waiting(device: CudaDevice) -> None:
    device._after_compute = lambda stream: None  # type: ignore[method-assign]


def _load_at_leisure(device: CudaDevice) -> None:
    device.load_now = lambda jobs: device.load(jobs) or []  # type: ignore[method-assign,func-returns-value]


#: What must go wrong without each of the waits.
CONTROLS: dict[str, Callable[[CudaDevice], None]] = {
    "no fence": _no_fence,
    "copies do not wait for the compute": _no_waiting,
    "the compute does not wait for a load": _load_at_leisure,
}


def wrong_values(
    gpu: Gpu, mover: str, rounds: int = 8, spoil: Callable[[CudaDevice], None] = lambda device: None
) -> int:
    """Return in how many places a value is not the one that the order of submission makes it.

    A round, all of it queued behind a busy compute stream: blocks are written and stored, and overwritten at once;
    other blocks are zeroed, loaded for the compute that follows, and read by it; further ones are zeroed and loaded.
    """
    blocks, per_chunk = 16, 4
    caches = [torch.zeros(blocks, ORDER_WORDS, dtype=torch.int64, device=gpu.device) for _ in range(4)]
    stored, now, later = (list(range(at, at + per_chunk)) for at in (0, 4, 8))
    wrong = 0
    with opened(gpu, make_regions(caches, blocks, per_chunk), 2, mover) as (device, segment):
        cells = torch.from_numpy(segment.data).view(torch.int64)
        size = sum(cache[0].numel() for cache in caches) * per_chunk
        slots = [cells[:size], cells[PoolShape(2, 1, size * 8).cell_nbytes // 8 :][:size]]
        spoil(device)
        for number in range(1, rounds + 1):
            slots[1].fill_(-number)
            seen = [torch.zeros_like(cache[now]) for cache in caches]
            gpu.keep_busy()
            device.fence(stored)
            _write(gpu, caches, stored, number)
            device.store([StoreJob(number, Piece(0, 0, tuple(stored)))])
            device.fence(stored)
            _write(gpu, caches, stored, number + 1000)
            _write(gpu, caches, now + later, 0)
            device.load_now([LoadJob("now", (Piece(1, 0, tuple(now)),), 1)])
            for cache, copy in zip(caches, seen, strict=True):
                gpu.submit(lambda cache=cache, copy=copy: copy.copy_(cache[now]))
            _write(gpu, caches, later, 0)
            device.load([LoadJob("later", (Piece(1, 0, tuple(later)),))])
            wait(gpu, device, 3)
            gpu.synchronize()
            places = [(slots[0], number), *((copy, -number) for copy in seen)]
            for cache in caches:
                places += [(cache[later], -number), (cache[stored], number + 1000)]
            wrong += sum(int((values != value).sum()) for values, value in places)
    return wrong


def _write(gpu: Gpu, caches: Sequence[torch.Tensor], blocks: Sequence[int], value: int) -> None:
    for cache in caches:
        gpu.submit(lambda cache=cache: cache[blocks[0] : blocks[-1] + 1].fill_(value))


def check_order(gpu: Gpu) -> Iterator[Row]:
    """Yield a row for each way to copy, and one for each wait that is left out."""
    for mover in gpu.movers:
        wrong = wrong_values(gpu, mover)
        yield Row("order", f"busy compute, {mover}", f"{wrong} wrong values", wrong == 0)
        for name, spoil in CONTROLS.items():
            wrong = wrong_values(gpu, mover, spoil=spoil)
            yield Row("order", f"control: {name}, {mover}", f"{wrong} wrong values", wrong > 0)


# -- waking


def wrong_after_waking(gpu: Gpu, kind: Kind, mover: str, *, rebinds: bool = True) -> int:
    """Store blocks, put other caches in the place of theirs, load them there; return the bytes that differ."""
    layers, blocks, per_chunk = 2, 8, 2
    before = kind.make(layers, blocks, gpu.device)
    for number, cache in enumerate(before):
        block_matrix(cache, blocks).random_(generator=torch.Generator(gpu.device).manual_seed(number))
    expected = [block_matrix(cache, blocks).clone() for cache in before]
    gpu.synchronize()
    pieces = [Piece(i, 0, tuple(range(i * per_chunk, (i + 1) * per_chunk))) for i in range(blocks // per_chunk)]
    with opened(gpu, regions_of(kind, before, per_chunk), len(pieces), mover) as (device, _):
        device.store([StoreJob(piece.slot, piece) for piece in pieces])
        wait(gpu, device, len(pieces))
        after = kind.make(layers, blocks, gpu.device)
        if rebinds:
            device.rebind(regions_of(kind, after, per_chunk))
        for cache in before:
            gpu.submit(block_matrix(cache, blocks).zero_)
        device.load([LoadJob("all", tuple(pieces))])
        wait(gpu, device, 1)
        gpu.synchronize()
    got = [block_matrix(cache, blocks) for cache in after]
    return sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in zip(got, expected, strict=True))


def check_waking(gpu: Gpu) -> Iterator[Row]:
    """Yield a row for each way to copy, and one for each without rebinding."""
    kind = KINDS["heads outside tokens"]
    for mover in gpu.movers:
        wrong = wrong_after_waking(gpu, kind, mover)
        yield Row("waking", f"other caches, {mover}", f"{wrong} wrong bytes", wrong == 0)
        wrong = wrong_after_waking(gpu, kind, mover, rebinds=False)
        yield Row("waking", f"control: no rebinding, {mover}", f"{wrong} wrong bytes", wrong > 0)


# -- speed


class Load(NamedTuple):
    """What is copied: layers, bytes of a block of one layer, blocks a chunk, chunks."""

    name: str
    layers: int
    block_nbytes: int
    per_chunk: int
    chunks: int


#: Blocks of 16 tokens in bfloat16: of a model with 8 KV heads of 128 on one rank, and on one of eight.
LOADS = [Load("64 KiB a block and layer", 32, 64 << 10, 2, 128), Load("8 KiB a block and layer", 32, 8 << 10, 16, 128)]


class Speed(NamedTuple):
    """Bytes a second of a batch of copies, by the GPU's clock, and the host's seconds to submit it."""

    nbytes_per_s: float
    submit_s: float


def limit(gpu: Gpu, nbytes: int, to_host: bool, repeats: int = 5) -> float:
    """Return the bytes a second of one copy between pinned memory and the GPU, the best of some."""
    host, there = gpu.pinned(nbytes), torch.zeros(nbytes, dtype=torch.uint8, device=gpu.device)
    source, target = (there, host) if to_host else (host, there)
    best = 0.0
    for _ in range(repeats + 1):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(gpu.device)
        began.record(stream)
        gpu.submit(lambda: target.copy_(source, non_blocking=True))
        ended.record(stream)
        gpu.synchronize()
        best = max(best, nbytes / (began.elapsed_time(ended) / 1e3))
    return best


def speeds(gpu: Gpu, load: Load, mover: str, repeats: int = 5) -> tuple[Speed, Speed]:
    """Return what stores and loads of scattered blocks reach, the best of some batches each."""
    rng = random.Random(2)
    blocks = load.per_chunk * load.chunks
    caches = [torch.zeros(blocks, load.block_nbytes, dtype=torch.uint8, device=gpu.device) for _ in range(load.layers)]
    best = [Speed(0.0, 0.0), Speed(0.0, 0.0)]
    with opened(gpu, make_regions(caches, blocks, load.per_chunk), load.chunks, mover) as (device, _):
        for _ in range(repeats + 1):
            order = rng.sample(range(blocks), blocks)
            pieces = [Piece(i, 0, tuple(order[i * load.per_chunk :][: load.per_chunk])) for i in range(load.chunks)]
            stores = [StoreJob(piece.slot, piece) for piece in pieces]
            for way in (0, 1):
                began = time.perf_counter()
                if way:
                    device.load([LoadJob("all", tuple(pieces))])
                else:
                    device.store(stores)
                submit_s = time.perf_counter() - began
                done = wait(gpu, device, 1 if way else load.chunks)
                speed = Speed(sum(d.nbytes for d in done) / sum(d.seconds for d in done), submit_s)
                best[way] = max(best[way], speed)
    return best[0], best[1]


def check_speed(gpu: Gpu, bar: float) -> Iterator[Row]:
    """Yield a row for each load, direction and way to copy.

    Of large blocks what the connector takes must reach the bar. Small ones are shown: with them a GPU is not limited by
    its link.
    """
    for load in LOADS:
        nbytes = load.layers * load.block_nbytes * load.per_chunk * load.chunks
        limits = limit(gpu, nbytes, to_host=True), limit(gpu, nbytes, to_host=False)
        for mover in gpu.movers:
            judged = load is LOADS[0] and mover == next(iter(gpu.movers))
            ways = zip(("to the host", "to the GPU"), speeds(gpu, load, mover), limits, strict=True)
            for direction, speed, top in ways:
                share = speed.nbytes_per_s / top
                rate = f"{speed.nbytes_per_s / 1e9:.1f} of {top / 1e9:.1f} GB/s ({share:.0%})"
                value = f"{rate}, submitted in {speed.submit_s * 1e3:.1f} ms"
                yield Row("speed", f"{load.name}, {direction}, {mover}", value, share >= bar if judged else None)


# -- a real engine


def check_engine(gpu_memory: float = 0.3) -> Iterator[Row]:
    """Yield rows for a real engine with seeded weights: what a tier gives is what a GPU hit of its length gives."""
    from engines import EngineProcess
    from seeded_model import write_seeded_llama

    work = Path(tempfile.mkdtemp(prefix="tierkv-check-gpu-"))
    settings = {
        "model": str(write_seeded_llama(work / "model", dtype="bfloat16", head_dim=128, hidden=512)),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 4096,
        "gpu_memory_utilization": gpu_memory,
        "kv_transfer_config": {
            "kv_connector": "TierKVConnector",
            "kv_connector_module_path": "tierkv_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_bytes": "256MiB", "disk_dir": str(work / "disk"), "disk_bytes": "1GiB"},
        },
    }
    rng = random.Random(3)
    prompt = [rng.randrange(2048) for _ in range(2817)]  # whole chunks and a token: every tier hits equally far
    try:
        with EngineProcess(settings, log=work / "first.log") as engine:
            cold = engine.ask(prompt=prompt, max_tokens=16)
            on_gpu = engine.ask(prompt=prompt, max_tokens=16)
            engine.reset_gpu()
            answers = {"host": engine.ask(prompt=prompt, max_tokens=16)}
        with EngineProcess(settings, log=work / "second.log") as engine:
            answers["disk"] = engine.ask(prompt=prompt, max_tokens=16)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    yield Row(
        "engine", "cold", f"{cold['num_cached']} of {len(prompt)} tokens were not computed", cold["num_cached"] == 0
    )
    for tier, answer in answers.items():
        same = answer["tokens"] == on_gpu["tokens"]
        off = max((abs(a - b) for a, b in zip(answer["logprobs"], on_gpu["logprobs"], strict=True)), default=0.0)
        tokens = "the same" if same else "OTHER"
        value = f"{answer['num_cached']} tokens from it, {tokens} tokens, log probabilities {off:.2g} off"
        yield Row("engine", tier, value, same and off < 0.02 and answer["num_cached"] == on_gpu["num_cached"])


# --


def rows_of(gpu: Gpu, bar: float, engine: bool) -> Iterator[Row]:
    """Yield all rows; a check that raises is one that fails."""
    checks: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        ("equality", lambda: check_equality(gpu)),
        ("order", lambda: check_order(gpu)),
        ("waking", lambda: check_waking(gpu)),
        ("speed", lambda: check_speed(gpu, bar)),
    ]
    if engine:
        checks.append(("engine", check_engine))
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Row(name, "", f"{type(error).__name__}: {error}", False)


def report(rows: Iterator[Row], about: dict[str, Any], file: Path | None) -> int:
    """Print rows as they come, write them to ``file``, and return the exit status."""
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    shown = []
    for row in rows:
        verdict = {True: "ok", False: "FAILED", None: "-"}[row.ok]
        print(f"{verdict:<7}{row.check:<10}{row.what:<58}{row.value}", flush=True)
        shown.append(row)
    failed = [row for row in shown if row.ok is False]
    if file is not None:
        file.write_text(
            json.dumps({"about": about, "rows": [asdict(row) for row in shown], "ok": not failed}, indent=1)
        )
    print(f"{len(failed)} of {len(shown)} checks failed" if failed else f"all {len(shown)} checks are well")
    return 1 if failed else 0


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bar", type=float, default=0.8, help="share of one pinned copy's speed to reach (default 0.8)"
    )
    parser.add_argument("--no-engine", action="store_true", help="leave the real engine out")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This machine has no GPU that torch can use through CUDA; there is nothing to check.", file=sys.stderr)
        return NO_GPU
    gpu = Gpu()
    has_vllm = importlib.util.find_spec("vllm") is not None
    about = {
        "gpu": torch.cuda.get_device_name(gpu.device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "vllm": "yes" if has_vllm else "no",
        "copies": " and ".join(gpu.movers),
    }
    return report(rows_of(gpu, args.bar, has_vllm and not args.no_engine), about, args.json)


if __name__ == "__main__":
    sys.exit(main())
