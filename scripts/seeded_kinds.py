"""Write small models of other kinds than llama with seeded random weights of realistic scale.

Tests need one model of each kind of KV cache: sliding windows beside full attention, windows alone, chunks of local
attention, latents. As in :mod:`seeded_model`, the output depends on every token that its layers look at.

    python scripts/seeded_kinds.py KIND DIRECTORY

There is no tokenizer: run the engine with `skip_tokenizer_init=True` and prompts of token ids.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from seeded_model import MARKER

# Raised when the weights of one and the same kind change.
GENERATOR_VERSION = 1
VOCAB = 2048
_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
#: Hugging Face's configuration of each kind. Windows are short, so that a prompt of a test is many of them long.
KINDS: dict[str, dict[str, Any]] = {
    # Five layers of windows of 96 tokens and one of full attention, twice.
    "gemma3": _COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 64,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "sliding_window": 96,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 64,
        "attention_bias": False,
    },
    # Windows only: one KV cache group that is none of full attention.
    "mistral": _COMMON
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 64,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "sliding_window": 96,
    },
    # Full attention with norms of queries and keys.
    "qwen3": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 64,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
    },
    # Chunks of 128 tokens of local attention and one layer of full attention.
    "llama4": _COMMON
    | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "head_dim": 64,
        "intermediate_size": 512,
        "intermediate_size_mlp": 512,
        "num_hidden_layers": 4,
        "attention_chunk_size": 128,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
        "moe_layers": [],
        "interleave_moe_layer_step": 0,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "attn_temperature_tuning": False,
    },
    # Latents of 512 and 64 values a token and layer instead of keys and values.
    "deepseek": _COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
    },
}


def write_seeded(path: Path | str, kind: str, seed: int = 0) -> Path:
    """Write the model of a kind to the directory `path`, unless the very same one is there; return the directory.

    Equal arguments give equal bytes. A directory that holds something else is refused with a `ValueError`. The
    directory appears whole, by a rename.
    """
    path = Path(path)
    made_from = {"version": GENERATOR_VERSION, "kind": kind, "config": KINDS[kind], "seed": seed}
    if path.exists():
        marker = path / MARKER
        if marker.is_file() and json.loads(marker.read_text()) == made_from:
            return path
        raise ValueError(f"{path} exists and is not this seeded model: remove it or choose another directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        _write(scratch, KINDS[kind] | {"dtype": "float32"}, seed)
        (scratch / MARKER).write_text(json.dumps(made_from, indent=2) + "\n")
        scratch.chmod(0o755)
        scratch.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _write(directory: Path, config: dict[str, Any], seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    made = AutoConfig.for_model(config["model_type"], **settings)
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in AutoModelForCausalLM.from_config(made).state_dict().items()}
    rng = np.random.default_rng(seed)
    weights = {name: torch.from_numpy(_values(rng, name, shape, config)) for name, shape in sorted(shapes.items())}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...], config: dict[str, Any]) -> Any:
    """Return a tensor's values. The scales are those of :mod:`seeded_model`, for the same reasons."""
    if len(shape) == 1:  # norms; Gemma adds 1 to them
        return np.full(shape, 0.0 if config["model_type"].startswith("gemma") else 1.0, dtype=np.float32)
    values = rng.standard_normal(shape, dtype=np.float32)
    if "embed_tokens" in name:
        # Gemma multiplies with the root of the hidden size.
        return values / np.float32(shape[1] ** 0.5 if config["model_type"].startswith("gemma") else 1.0)
    gain = 3.0 if "lm_head" in name else 1.6 if any(part in name for part in ("q_proj", "k_proj")) else 1.0
    return values * np.float32(gain / shape[-1] ** 0.5)


if __name__ == "__main__":
    print(write_seeded(sys.argv[2], sys.argv[1]))
