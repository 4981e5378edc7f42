"""Remembered keys of prompts' beginnings: always those of :func:`tierkv.keys.chain_keys`, hashed once."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

import pytest

from tierkv import keys as keys_module
from tierkv.chains import RUN_TOKENS, ChainMemo
from tierkv.keys import chain_keys, root_key

ROOT = root_key(b"model")


@pytest.fixture
def num_hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many hashes were made, in a list of one."""
    count, sha256 = [0], hashlib.sha256

    def counted(data: bytes) -> Any:
        count[0] += 1
        return sha256(data)

    monkeypatch.setattr(keys_module.hashlib, "sha256", counted)
    return count


@pytest.mark.parametrize("chunk_tokens", [16, 48, 256, 2048, 4096])
def test_keys_are_those_of_the_chain(chunk_tokens: int) -> None:
    """Prompts that begin alike, end anywhere and differ anywhere, of several roots, more than are remembered."""
    rng = Random(chunk_tokens)
    memo = ChainMemo(chunk_tokens, num_runs=8)
    roots = [ROOT, root_key(b"model", tenant=b"a"), root_key(b"other")]
    prompts = [[rng.randrange(1 << 17) for _ in range(4 * RUN_TOKENS)]]
    for _ in range(100):
        tokens = list(rng.choice(prompts))
        if rng.random() < 0.5:
            tokens[rng.randrange(len(tokens))] ^= 1
        prompts.append(tokens)
        tokens = tokens[: rng.randrange(len(tokens) + 1)]
        root = rng.choice(roots)
        assert memo.keys(root, tokens) == chain_keys(root, tokens, chunk_tokens)
        assert len(memo) <= 8


def test_runs_that_end_alike_are_told_apart() -> None:
    """A run is looked up by its last tokens, and compared in full."""
    memo = ChainMemo(16)
    one, other = [1] * RUN_TOKENS, [2] + [1] * (RUN_TOKENS - 1)
    for tokens in (one, other, one, other):
        assert memo.keys(ROOT, tokens) == chain_keys(ROOT, tokens, 16)


def test_what_came_before_is_not_hashed_again(num_hashed: list[int]) -> None:
    memo = ChainMemo(32)
    turn = list(range(3 * RUN_TOKENS + 32))
    memo.keys(ROOT, turn)
    assert num_hashed[0] == len(turn) // 32
    num_hashed[0] = 0
    memo.keys(ROOT, turn + [7] * 64)
    assert num_hashed[0] == 3, "the chunks beyond the last whole run"
    memo.keys(root_key(b"other"), turn)
    assert num_hashed[0] == 3 + 1 + len(turn) // 32, "of another root, all of them, and that root"


def test_what_was_longest_unused_is_forgotten_first(num_hashed: list[int]) -> None:
    memo = ChainMemo(RUN_TOKENS, num_runs=2)
    first, second, third = ([seed] * RUN_TOKENS for seed in range(3))
    for tokens in (first, second, first, third):
        memo.keys(ROOT, tokens)
    assert (len(memo), num_hashed[0]) == (2, 3)
    memo.keys(ROOT, first)
    assert num_hashed[0] == 3, "used again before the third came"
    memo.keys(ROOT, second)
    assert num_hashed[0] == 4


def test_ids_that_no_token_has_are_refused() -> None:
    with pytest.raises(OverflowError):
        ChainMemo(16).keys(ROOT, [-1] * 16)
