"""Write small models of other kinds than llama with seeded random weights of realistic scale.

Tests need one model of each kind of KV cache: sliding windows beside full attention, windows alone, chunks of local
attention, latents, recurrent state of several kinds. As in :mod:`seeded_model`, the output depends on every token that
its layers look at.

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
#: Of these, what a model without attention has no use for.
_ATTENTION = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
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
    # Convolutions over three tokens, which keep the last two as their state, and one layer of full attention.
    "lfm2": _COMMON
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "intermediate_size": 512,
        "block_ff_dim": 512,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 256,
        "block_dim": 256,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    # Mamba 2 and one layer of full attention.
    "granite": _COMMON
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "intermediate_size": 512,
        "shared_intermediate_size": 512,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "layers_block_type": ["mamba", "attention", "mamba", "mamba"],
        "attention_multiplier": 0.125,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_expand": 1,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 32,
    },
    # Mamba 2 alone: one KV cache group, of recurrent state.
    "mamba2": {name: value for name, value in _COMMON.items() if name not in _ATTENTION}
    | {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_hidden_layers": 3,
        "expand": 1,
        "num_heads": 8,
        "head_dim": 32,
        "state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 32,
        "rms_norm": True,
        "norm_before_gate": False,
    },
    # Gated delta rule (linear attention) and one layer of full attention. vLLM's kernels for CPUs want bfloat16.
    "qwen3_next": _COMMON
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "dtype": "bfloat16",
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mlp_only_layers": [0, 1, 2],
        "decoder_sparse_step": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
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
        _write(scratch, {"dtype": "float32"} | KINDS[kind], seed)
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
    dtype: torch.dtype = getattr(torch, config["dtype"])
    weights = {
        name: torch.from_numpy(_values(rng, name, shape, config)).to(dtype) for name, shape in sorted(shapes.items())
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...], config: dict[str, Any]) -> Any:
    """Return a tensor's values. The scales are those of :mod:`seeded_model`, for the same reasons."""
    if name.endswith("A_log"):  # how fast a head forgets: between hardly and within a few tokens, as after training
        return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
    if name.endswith("dt_bias"):  # of which the softplus is a step between 0.001 and 0.1
        step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
        return (step + np.log(-np.expm1(-step))).astype(np.float32)
    if name.endswith("bias"):
        return np.zeros(shape, dtype=np.float32)
    if len(shape) == 1:  # norms; Gemma adds 1 to them
        return np.full(shape, 0.0 if config["model_type"].startswith("gemma") else 1.0, dtype=np.float32)
    values = rng.standard_normal(shape, dtype=np.float32)
    if "embed_tokens" in name and config["model_type"] == "lfm2":  # it gives the logits too, whatever its configuration
        return values * np.float32(3.0 / shape[1] ** 0.5)
    if "embed_tokens" in name:
        # Gemma multiplies with the root of the hidden size.
        return values / np.float32(shape[1] ** 0.5 if config["model_type"].startswith("gemma") else 1.0)
    gain = 3.0 if "lm_head" in name else 1.6 if any(part in name for part in ("q_proj", "k_proj")) else 1.0
    return values * np.float32(gain / shape[-1] ** 0.5)


if __name__ == "__main__":
    print(write_seeded(sys.argv[2], sys.argv[1]))
