"""Keys of prompts whose beginnings have come before: what was hashed once is looked up.

A conversation's next turn, a document asked about again, a prompt that other engines have stored: most of a long prompt
has been hashed by this engine before. One SHA-256 a chunk is nearly all that planning costs on vLLM's scheduler thread,
so runs of chunks are remembered by what decides their keys: the key before them and their tokens, all of them compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.keys import packed_chain, packed_view

#: Tokens of a remembered run. What a prompt has beyond its last whole run is hashed each time: at most 128 chunks.
RUN_TOKENS = 2048
#: Remembered runs, 2 million tokens. Each costs its tokens (8 KiB) and its keys (65 bytes each): 9 to 17 MiB in all.
NUM_RUNS = 1024
#: Bytes of tokens that tell runs with one past apart, for nearly all runs; of others the last one is remembered.
NAME_NBYTES = 64


class ChainMemo:
    """The keys of runs of chunks that were asked for of late; the longest unused goes first.

    Args:
        chunk_tokens: tokens a chunk.
        num_runs: how many runs are remembered.
    """

    def __init__(self, chunk_tokens: int, num_runs: int = NUM_RUNS) -> None:
        self._chunk_tokens = chunk_tokens
        self._run_tokens = max(1, RUN_TOKENS // chunk_tokens) * chunk_tokens
        self._num_runs = num_runs
        # By the key before a run and its last tokens: hashing all of them would cost a tenth of what it saves.
        self._runs: dict[tuple[bytes, bytes], tuple[bytes, list[bytes]]] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def keys(self, root: bytes, tokens: Sequence[int]) -> list[bytes]:
        """Return what :func:`tierkv.keys.chain_keys` gives for a prompt without extras.

        Raises:
            OverflowError: a token id is negative or needs more than 32 bits.
        """
        packed, run_nbytes, chunk_nbytes = packed_view(tokens), 4 * self._run_tokens, 4 * self._chunk_tokens
        rest = len(packed) - len(packed) % run_nbytes
        keys: list[bytes] = []
        parent = root
        for at in range(0, rest, run_nbytes):
            keys += self._run(parent, bytes(packed[at : at + run_nbytes]))
            parent = keys[-1]
        return keys + packed_chain(parent, packed[rest : len(packed) - len(packed) % chunk_nbytes], self._chunk_tokens)

    def _run(self, parent: bytes, packed: bytes) -> list[bytes]:
        name = parent, packed[-NAME_NBYTES:]
        run = self._runs.pop(name, None)
        if run is None or run[0] != packed:
            run = packed, packed_chain(parent, packed, self._chunk_tokens)
            if len(self._runs) >= self._num_runs:
                del self._runs[next(iter(self._runs))]
        self._runs[name] = run
        return run[1]
