"""``scripts/check-gpu``: what it says where there is no GPU, and, on one that is not real, that it finds faults."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import check_gpu
from check_gpu import (
    CONTROLS,
    KINDS,
    Gpu,
    Load,
    Row,
    check_speed,
    check_waking,
    report,
    rows_of,
    wrong_after_waking,
    wrong_bytes,
    wrong_values,
)
from fake_cuda import MOVERS, FakeCuda
from tierkv_connector import cuda as cuda_module
from tierkv_connector.cuda import CudaDevice

SCRIPT = Path(check_gpu.__file__).with_name("check-gpu")
#: Rows in many pieces never go in a batch.
CASES = [(kind, mover) for kind in KINDS for mover in MOVERS if (kind, mover) != ("portable, tokens outside", "batch")]


class FakeGpu(Gpu):
    """The fake machine, as the checks use one."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__("cpu", {mover: cuda.opener(mover) for mover in MOVERS})
        self.cuda = cuda

    def submit(self, work: Callable[[], object]) -> None:
        self.cuda.submit(work)  # type: ignore[arg-type]

    def keep_busy(self) -> None:
        for _ in range(5):
            self.cuda.submit(lambda: None)

    def pause(self) -> None:
        self.cuda.run_one()

    def synchronize(self) -> None:
        self.cuda.run_all()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    cuda = FakeCuda(3)
    monkeypatch.setattr(cuda_module.torch, "cuda", cuda)
    monkeypatch.setattr(check_gpu, "ORDER_WORDS", 64)
    monkeypatch.setattr(check_gpu, "LOADS", [Load("large", 2, 64, 2, 4), Load("small", 2, 8, 2, 4)])
    return FakeGpu(cuda)


def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run([SCRIPT, "--no-engine"], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.splitlines()[-1] == (
        "This machine has no GPU that torch can use through CUDA; there is nothing to check."
    )


@pytest.mark.parametrize(("kind", "mover"), CASES)
def test_bytes_of_every_layout_are_right(gpu: FakeGpu, kind: str, mover: str) -> None:
    assert wrong_bytes(gpu, KINDS[kind], mover, layers=2, blocks=8, per_chunk=2) == 0


def test_bytes_that_are_wrong_are_found(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "fence", lambda self, block_ids: None)
    assert sum(wrong_bytes(gpu, KINDS["latents"], "batch", layers=2, blocks=8, per_chunk=2) for _ in range(8)) > 0


@pytest.mark.parametrize("mover", MOVERS)
def test_order_is_right_and_is_not_without_any_of_the_waits(gpu: FakeGpu, mover: str) -> None:
    assert wrong_values(gpu, mover, rounds=20) == 0
    for spoil in CONTROLS.values():
        assert wrong_values(gpu, mover, rounds=20, spoil=spoil) > 0


@pytest.mark.parametrize(("kind", "mover"), CASES)
def test_caches_that_came_in_the_place_of_others_are_loaded_to(gpu: FakeGpu, kind: str, mover: str) -> None:
    assert wrong_after_waking(gpu, KINDS[kind], mover) == 0
    assert wrong_after_waking(gpu, KINDS[kind], mover, rebinds=False) > 0


def test_every_row_of_waking_is_judged(gpu: FakeGpu) -> None:
    assert [row.ok for row in check_waking(gpu)] == [True] * 2 * len(MOVERS)


def test_speed_is_judged_of_large_blocks_and_of_what_the_connector_takes(gpu: FakeGpu) -> None:
    """On this machine a batch of copies takes a millisecond, whatever its size, and so does a single copy."""
    rows = list(check_speed(gpu, 0.8))
    assert [row.ok for row in rows] == [True, True] + [None] * 6
    assert "1.0 MB" not in rows[0].value and "(100%)" in rows[0].value
    assert [row.ok for row in check_speed(gpu, 1.1)][:2] == [False, False]


def test_the_table_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("a", "one", "0 wrong", True), Row("b", "two", "fast", None)]
    assert report(iter(rows), {"gpu": "fake"}, tmp_path / "a.json") == 0
    assert "all 2 checks are well" in capsys.readouterr().out
    assert report(iter([*rows, Row("c", "three", "9 wrong", False)]), {"gpu": "fake"}, tmp_path / "b.json") == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "gpu fake"
    assert shown[3].split() == ["FAILED", "c", "three", "9", "wrong"]
    assert shown[-1] == "1 of 3 checks failed"
    told: dict[str, Any] = json.loads((tmp_path / "b.json").read_text())
    assert (told["ok"], told["about"], len(told["rows"])) == (False, {"gpu": "fake"}, 3)
    assert json.loads((tmp_path / "a.json").read_text())["ok"]


def test_a_check_that_raises_is_one_that_failed(gpu: FakeGpu) -> None:
    gpu.cuda.fails_at = 0
    rows = list(rows_of(gpu, 0.8, engine=False))
    names = ["equality", "order", "waking", "speed"]
    assert [(row.check, row.ok) for row in rows] == [(name, False) for name in names]
    assert all("RuntimeError: a copy could not be started" in row.value for row in rows)
