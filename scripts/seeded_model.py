"""Write a small llama with seeded random weights of realistic scale.

Tests and benchmarks need engines whose output depends on every token of the prompt's KV. vLLM's
`load_format="dummy"` does not give that: its weights are so small that outputs fall into cycles of
two tokens, whatever the KV holds. Here attention is sharp enough, and the layers' share of the
residual stream large enough, that distinct prompts give distinct outputs that do not cycle.

    python scripts/seeded_model.py DIRECTORY [--hidden 1024 --layers 8 --heads 16 --dtype bfloat16 ...]

There is no tokenizer: run the engine with `skip_tokenizer_init=True` and prompts of token ids.
"""

import argparse
import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MARKER = "seeded.json"

# Raised when the weights of one and the same seed change.
GENERATOR_VERSION = 1

# Standard deviations in units of 1/sqrt(fan in). Queries and keys make attention scores with a
# deviation of about GAIN**2: attention that selects, as a trained model's does, instead of averaging.
_QUERY_KEY_GAIN = 1.6
_VALUE_GAIN = 1.0
_LOGIT_STD = 3.0


def _weights(
    *, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int, intermediate: int, seed: int
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Every tensor of the model under its Hugging Face name, always in the same order."""
    rng = np.random.default_rng(seed)

    def normal(rows: int, columns: int, gain: float) -> npt.NDArray[np.float32]:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(gain / columns**0.5)
        return values

    ones = np.ones(hidden, dtype=np.float32)
    # One row a token with a deviation of 1: the residual stream starts at unit scale.
    yield "model.embed_tokens.weight", normal(vocab, hidden, hidden**0.5)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones
        yield f"{prefix}.self_attn.q_proj.weight", normal(heads * head_dim, hidden, _QUERY_KEY_GAIN)
        yield f"{prefix}.self_attn.k_proj.weight", normal(kv_heads * head_dim, hidden, _QUERY_KEY_GAIN)
        yield f"{prefix}.self_attn.v_proj.weight", normal(kv_heads * head_dim, hidden, _VALUE_GAIN)
        yield f"{prefix}.self_attn.o_proj.weight", normal(hidden, heads * head_dim, _VALUE_GAIN)
        yield f"{prefix}.post_attention_layernorm.weight", ones
        yield f"{prefix}.mlp.gate_proj.weight", normal(intermediate, hidden, _VALUE_GAIN)
        yield f"{prefix}.mlp.up_proj.weight", normal(intermediate, hidden, _VALUE_GAIN)
        yield f"{prefix}.mlp.down_proj.weight", normal(hidden, intermediate, _VALUE_GAIN)
    yield "model.norm.weight", ones
    yield "lm_head.weight", normal(vocab, hidden, _LOGIT_STD)


def write_seeded_llama(
    path: Path | str,
    *,
    hidden: int = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 2048,
    intermediate: int = 704,
    seed: int = 0,
    max_position: int = 16384,
    dtype: str = "float32",
) -> Path:
    """Write the model to the directory `path`, unless the very same one is there; return the directory.

    Equal arguments give equal bytes. A directory that holds something else is refused with a
    `ValueError`. The directory appears whole, by a rename.
    """
    path = Path(path)
    shape = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": vocab,
        "intermediate": intermediate,
        "seed": seed,
    }
    made_from = {"version": GENERATOR_VERSION, **shape, "max_position": max_position, "dtype": dtype}
    if path.exists():
        return _check_same(path, made_from)

    import torch
    from safetensors.torch import save_file

    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
    }
    torch_dtype: torch.dtype = getattr(torch, dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        weights = {name: torch.from_numpy(values.copy()).to(torch_dtype) for name, values in _weights(**shape)}
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "model.safetensors").chmod(0o644)
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (scratch / MARKER).write_text(json.dumps(made_from, indent=2) + "\n")
        scratch.chmod(0o755)
        try:
            scratch.rename(path)
        except OSError:
            # Another process was faster.
            return _check_same(path, made_from)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _check_same(path: Path, made_from: dict[str, Any]) -> Path:
    marker = path / MARKER
    if marker.is_file() and json.loads(marker.read_text()) == made_from:
        return path
    raise ValueError(f"{path} exists and is not this seeded model: remove it or choose another directory")


def main() -> int:
    """The command line: one option for each parameter of `write_seeded_llama`."""
    parser = argparse.ArgumentParser(description="Write a small llama with seeded random weights.")
    parser.add_argument("path", type=Path)
    for name, parameter in inspect.signature(write_seeded_llama).parameters.items():
        if name != "path":
            option = f"--{name.replace('_', '-')}"
            default = parameter.default
            parser.add_argument(option, type=type(default), default=default, help=f"default: {default}")
    print(write_seeded_llama(**vars(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
