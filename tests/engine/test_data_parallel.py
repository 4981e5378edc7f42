"""Data parallel replicas behind vLLM's OpenAI server: what one has stored the other loads, from one store server.

Its start takes a minute and more on two cores: it runs with TIERKV_FULL=1.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from api_server import api_server, write_tokenizer
from engine_process import CHUNK_TOKENS, Prompts, admin, drain, server_pid, shut_down
from leaks import holders, pool_files, processes, shm_names
from records import wait_until
from tierkv.config import LINGER_S, socket_path
from tierkv.messages import Select

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not os.environ.get("TIERKV_FULL"), reason="takes more than a minute; set TIERKV_FULL=1"),
]
NUM_REPLICAS = 2
SIZE = 4 * CHUNK_TOKENS
PROMPTS = Prompts(seed=53)
START_TIMEOUT_S = 420.0


class Replied(NamedTuple):
    """An answer of the server: the text, log probabilities of its tokens, and tokens of the prompt by tier."""

    text: str
    logprobs: list[float]
    hits: dict[str, int]


class Served(NamedTuple):
    """A server with its replicas.

    Attributes:
        url: its address.
        disk: the directory of the store server's disk tier.
        mark: in the environment of every process that belongs to it.
        names: what was in /dev/shm before.
        ending: ends it with SIGTERM when it is closed.
    """

    url: str
    disk: Path
    mark: str
    names: set[str]
    ending: contextlib.ExitStack

    def ask(self, rank: int, prompt: list[int], **more: Any) -> Replied:
        """Have a replica answer a prompt."""
        body = {"model": "m", "max_tokens": 8, "temperature": 0, "prompt": prompt, "ignore_eos": True, "logprobs": 1}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body | {"kv_transfer_params": {"tierkv": {}}} | more).encode(),
            {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer = json.load(reply)
        (choice,) = answer["choices"]
        hits = answer["kv_transfer_params"]["tierkv"]["hit_tokens"]
        return Replied(choice["text"], choice["logprobs"]["token_logprobs"], {t: n for t, n in hits.items() if n})

    def stored(self) -> int:
        """Return how many chunks the disk has, once everything that the server has taken is written."""
        drain(self.disk)
        with admin(self.disk) as client:
            return sum(int(row["num_entries"]) for row in client.ask("TKV.STAT")["tiers"] if row["name"] == "disk")

    def store(self, rank: int, prompt: list[int], **more: Any) -> Replied:
        """Have a replica store a prompt that it has not seen, and wait until it is on the disk."""
        num = self.stored()
        reply = self.ask(rank, prompt, **more)
        wait_until(lambda: self.stored() == num + len(prompt) // CHUNK_TOKENS, 30.0)
        return reply

    def shares(self, rank: int) -> bool:
        """Return whether a replica stores: each gets there in its own time, when it knows what its weights are."""
        num = self.stored()
        self.ask(rank, PROMPTS.new(CHUNK_TOKENS + 1))
        return self.stored() > num


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("parallel")
    shutil.copytree(model, directory / "model")
    write_tokenizer(directory / "model")
    disk, mark = directory / "disk", f"TIERKV_TEST_{secrets.token_hex(8)}"
    connector = {
        "chunk_tokens": CHUNK_TOKENS,
        "host_bytes": "64MiB",
        "disk_dir": str(disk),
        "disk_bytes": "256MiB",
        "deadline_s": 30.0,
        "cost_gate": False,
    }
    transfer = {"kv_connector": "TierKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": connector}
    env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", mark: "1"}
    more = ("--data-parallel-size", str(NUM_REPLICAS))
    names = shm_names()
    with contextlib.ExitStack() as stack:
        stack.callback(shut_down, disk)
        server = api_server(
            directory / "model",
            directory / "server.log",
            transfer,
            *more,
            start_timeout_s=START_TIMEOUT_S,
            end=signal.SIGTERM,
            **env,
        )
        ending = contextlib.ExitStack()
        stack.callback(ending.close)
        served = Served(ending.enter_context(server), disk, mark, names, ending)
        for rank in range(NUM_REPLICAS):
            wait_until(lambda rank=rank: served.shares(rank), 60.0)
        yield served


def test_one_store_server_serves_every_replica(served: Served) -> None:
    with admin(served.disk) as client:
        stat = client.ask("TKV.STAT")
    assert stat["server"]["num_engines"] == NUM_REPLICAS
    assert len({engine["engine_id"] for engine in stat["engines"]}) == NUM_REPLICAS
    assert len({engine["namespace"] for engine in stat["engines"]}) == 1


@pytest.mark.parametrize("first", range(NUM_REPLICAS))
def test_what_one_replica_stored_the_other_loads(served: Served, first: int) -> None:
    second = (first + 1) % NUM_REPLICAS
    prompt = PROMPTS.new(SIZE + 20)
    computed = served.store(first, prompt)
    assert computed.hits == {}
    on_gpu = served.ask(first, prompt)
    assert on_gpu.hits == {"gpu": SIZE}
    loaded = served.ask(second, prompt)
    assert loaded.hits == {"disk": SIZE}
    assert loaded[:2] == on_gpu[:2]
    assert loaded.text == computed.text
    assert max(abs(a - b) for a, b in zip(loaded.logprobs, computed.logprobs, strict=True)) < 1e-4
    again = served.ask(second, prompt)
    assert again.hits == {"gpu": SIZE}
    assert again[:2] == on_gpu[:2]


def test_a_tenant_of_one_replica_is_one_of_the_other(served: Served) -> None:
    prompt = PROMPTS.new(SIZE + 20)
    served.store(0, prompt, cache_salt="mine")
    assert served.ask(1, prompt, cache_salt="yours").hits == {}
    assert served.ask(1, prompt).hits == {}
    assert served.ask(1, prompt, cache_salt="mine").hits == {"disk": SIZE}


def test_what_is_gone_from_the_disk_the_other_computes(served: Served) -> None:
    """A control: it is the disk that the second one's hits come from."""
    prompt = PROMPTS.new(SIZE + 20)
    served.store(0, prompt)
    with admin(served.disk) as client:
        client.ask("TKV.EVICT", Select(tiers=["disk"], everything=True))
    assert served.ask(1, prompt).hits == {}


def test_after_sigterm_nothing_is_left(served: Served) -> None:
    """The last one: neither of the replicas, nor of their store server once its linger is over."""
    server = server_pid(served.disk)
    marked = processes(-1, served.mark)  # vLLM's engines write their titles where the mark was
    (group,) = {os.getpgid(pid) for pid in marked - {server}}
    started = processes(group, served.mark)
    segments: set[str] = set().union(*(pool_files(pid) for pid in started))
    assert server in started and len(started) > NUM_REPLICAS + 1
    assert server in holders(segments) <= started and len(holders(segments)) > NUM_REPLICAS
    served.ending.close()
    wait_until(lambda: processes(group, served.mark) <= {server}, 20.0)
    wait_until(lambda: not processes(group, served.mark), LINGER_S + 20)
    assert not socket_path(served.disk).exists()
    assert not holders(segments)
    assert shm_names() <= served.names
