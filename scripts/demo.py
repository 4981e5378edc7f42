"""The demo: one prompt of about 3,000 tokens, answered cold and from each tier, with the same answer every time.

SmolLM2-135M-Instruct on vLLM, a document and questions about it from ``scripts/data``. An embedded Valkey is the shared
tier. Prints time to first token and cached tokens for each tier, whether the answers are equal, and then what
``tierkv ls`` shows and how an eviction turns a hit into a miss.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo_model import ensure_demo_model
from engines import EngineFailedError, EngineProcess, Ticker, Valkey
from tierkv.client import AdminClient
from tierkv.config import socket_path

_DATA = Path(__file__).resolve().parent / "data"
_TIERS = ("host", "disk", "shared")
MAX_TOKENS = 40


def on_gpu() -> bool:
    """Return whether vLLM will run on a CUDA device here."""
    import torch

    return bool(torch.cuda.is_available())


def engine_settings(model: Path, disk_dir: Path, shared_url: str) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``: what a user writes, apart from the sizes."""
    settings: dict[str, Any] = {
        "model": str(model),
        "served_model_name": "SmolLM2-135M-Instruct",
        "dtype": "float32",  # cold and cached runs then differ by rounding only, far below what could change a token
        "max_model_len": 4096,
        "enforce_eager": True,
        "kv_transfer_config": {
            "kv_connector": "TierKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "host_bytes": "1GiB",
                "disk_dir": str(disk_dir),
                "disk_bytes": "2GiB",
                "shared_url": shared_url,
                "spill": {"shared": "through"},
            },
        },
    }
    if not on_gpu():
        settings |= {"block_size": 32}
    return settings


class Demo:
    """The steps, and the table that they fill."""

    def __init__(self, work: Path, shared_url: str) -> None:
        self._model = ensure_demo_model()
        self._work = work
        self._shared_url = shared_url
        self._document = (_DATA / "document.txt").read_text()
        self.questions = (_DATA / "questions.txt").read_text().splitlines()
        self.rows: list[tuple[str, dict[str, Any], dict[str, int]]] = []

    def start(self, node: str) -> EngineProcess:
        """Start an engine on node ``node``, which has a disk of its own, and warm it up with an unrelated prompt."""
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        with Ticker(f"starting an engine on node {node}"):
            log = self._work / f"engine-{node}-{time.time_ns()}.log"
            engine = EngineProcess(engine_settings(self._model, self.disk(node), self._shared_url), env, log)
            engine.ask(messages=[{"role": "user", "content": "Say hello. " * 60}], max_tokens=4)
        return engine

    def disk(self, node: str) -> Path:
        """Return the disk directory of a node."""
        return self._work / f"node-{node}"

    def counters(self, node: str) -> dict[str, int]:
        """Return the engine's hits by tier, in chunks, as its store server reports them."""
        with AdminClient(socket_path(self.disk(node))) as client:
            engines = client.ask("TKV.STAT")["engines"]
        return {tier: sum(e["counters"].get(f"{tier}_hits", 0) for e in engines) for tier in _TIERS}

    def drain(self, node: str) -> None:
        """Wait until all that was stored has reached the disk and the shared tier."""
        with AdminClient(socket_path(self.disk(node))) as client:
            while any(e["counters"]["store_queue_nbytes"] for e in client.ask("TKV.STAT")["engines"]):
                time.sleep(0.05)
            client.call("TKV.DRAIN", 30)

    def ask(self, label: str, node: str, engine: EngineProcess, question: str) -> dict[str, Any]:
        """Ask a question and note the row."""
        messages = [{"role": "user", "content": f"{self._document}\n\n{question}"}]
        before = self.counters(node)
        with Ticker(label):
            answer = engine.ask(messages=messages, max_tokens=MAX_TOKENS)
        after = self.counters(node)
        self.rows.append((label, answer, {t: after[t] - before[t] for t in _TIERS}))
        return answer


def run(work: Path, console: Console) -> bool:
    """Run all steps and return whether every answer was equal and every tier answered where it should."""
    with Valkey(work) as valkey:
        demo = Demo(work, valkey.url)
        question = demo.questions[0]
        with demo.start("A") as engine:
            demo.ask("cold: computed", "A", engine, question)
            demo.ask("GPU hit", "A", engine, question)
            engine.reset_gpu()
            demo.ask("host hit (GPU cache emptied)", "A", engine, question)
            demo.ask("another question on it (GPU)", "A", engine, demo.questions[1])
            demo.drain("A")
        with demo.start("A") as engine:
            demo.ask("disk hit (engine restarted)", "A", engine, question)
        with demo.start("B") as engine:
            demo.ask("shared hit (second engine, empty host and disk)", "B", engine, question)
            ok = show(demo, console)
            return evict(demo, engine, question, console) and ok


def show(demo: Demo, console: Console) -> bool:
    """Print the table and return whether it is as it should be."""
    table = Table(title="One prompt, from every tier", title_justify="left")
    table.add_column("run")
    for name in ("first token", "speed-up", "prompt", "cached", "host", "disk", "shared"):
        table.add_column(name, justify="right")
    table.add_column("answer")
    cold = demo.rows[0][1]
    ok = True
    for label, answer, hits in demo.rows:
        same = answer["tokens"] == cold["tokens"]
        other = "another" in label
        worst = max((abs(a - b) for a, b in zip(answer["logprobs"], cold["logprobs"], strict=False)), default=0.0)
        equal = "-" if other else f"equal (logprobs within {worst:.0e})" if same else "DIFFERENT"
        ok &= (same or other) and all(bool(hits[t]) == label.startswith(f"{t} hit") for t in _TIERS)
        speed = f"{cold['ttft_s'] / answer['ttft_s']:.0f} x"
        chunks = [str(hits[t]) if hits[t] else "" for t in _TIERS]
        row = [f"{answer['ttft_s'] * 1e3:.0f} ms", speed, str(answer["num_prompt"]), str(answer["num_cached"])]
        table.add_row(label, *row, *chunks, equal)
    console.print()
    console.print(table)
    console.print("prompt and cached in tokens; host, disk, shared: chunks that the engine loaded from that tier\n")
    console.print(f"Q: {demo.questions[0]}\nA: {cold['text'].strip()}\n", markup=False)
    return ok


def evict(demo: Demo, engine: EngineProcess, question: str, console: Console) -> bool:
    """Show what is stored, evict the document everywhere with all that continues it, and ask again."""
    socket = socket_path(demo.disk("B"))
    tierkv(console, "ls", "--server", str(socket))
    document = shared_prefix(socket)
    console.print(f"The prompts have one document in common; its stored prefix ends at chunk {document}.")
    tierkv(console, "evict", document, "--server", str(socket))
    engine.reset_gpu()
    answer = demo.ask("after eviction", "B", engine, question)
    hits = demo.rows[-1][2]
    missed = not any(hits.values()) and answer["num_cached"] == 0
    console.print(
        f"asked again: {answer['num_cached']} tokens cached, first token after {answer['ttft_s'] * 1e3:.0f} ms: "
        + ("a miss on every tier, and the same answer" if missed else "STILL A HIT")
    )
    return missed and answer["tokens"] == demo.rows[0][1]["tokens"]


def shared_prefix(socket: Path) -> str:
    """Return the id of the last chunk that the longest stored prefix shares with another one."""
    with AdminClient(socket) as client:
        return str(max(client.ask("TKV.LS", {}), key=lambda row: row["tokens"])["branch"])


def tierkv(console: Console, *words: str) -> None:
    """Run the CLI as a user does."""
    shown = [w if not w.startswith("/") else Path(w).name for w in words]
    console.print(f"$ tierkv {' '.join(shown)}", markup=False, highlight=False)
    subprocess.run([str(Path(sys.executable).parent / "tierkv"), *words], check=True)
    console.print()


def main() -> int:
    """Run the demo; exit status 1 if an answer differed or a tier did not answer."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print("TierKV demo: about 2 minutes on two cores (three engine starts, two cold prefills of 3,000 tokens)")
    work = Path(tempfile.mkdtemp(prefix="tierkv-demo-"))
    try:
        ok = run(work, console)
    except EngineFailedError as error:
        console.print(str(error), markup=False)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    console.print("\n[bold]All answers equal; every tier answered.[/]" if ok else "\n[bold red]Something differed.[/]")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
