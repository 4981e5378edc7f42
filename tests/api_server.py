"""vLLM's OpenAI server, in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_process import VOCAB
from servers import free_port
from vllm_versions import engine_env

START_TIMEOUT_S = 180.0


@contextlib.contextmanager
def api_server(
    model: Path,
    log: Path,
    transfer: dict[str, Any],
    *more: str,
    start_timeout_s: float = START_TIMEOUT_S,
    end: signal.Signals = signal.SIGINT,
    **env: str,
) -> Iterator[str]:
    """Run it, with the model under the name ``m``; yields its URL once it is healthy.

    Args:
        log: file for what it prints.
        transfer: vLLM's ``kv_transfer_config``.
        more: further arguments.
        start_timeout_s: seconds until it is healthy, at most.
        end: the signal that ends it.
        env: further environment variables.
    """
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m",
        "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--block-size", "32",
        "--max-model-len", "2560", "--num-gpu-blocks-override", "256",
        "--kv-transfer-config", json.dumps(transfer), *more,
    ]  # fmt: skip
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=os.environ | settings | engine_env() | env, stdout=out, stderr=out, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + start_timeout_s
        while not _healthy(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(end)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _healthy(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=2).close()
    except OSError:
        return False
    return True


def write_tokenizer(directory: Path) -> None:
    """A tokenizer with a word for every token id, ``w0`` to ``w2047``, and a chat template that adds nothing."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    words.save(str(directory / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "model_max_length": 2560,
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
