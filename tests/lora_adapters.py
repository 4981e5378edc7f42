"""LoRA adapters for the seeded models, with weights that change every token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 8


def write_adapter(
    path: Path, seed: int, *, hidden: int = 256, layers: int = 4, heads: int = 4, kv_heads: int = 2, head_dim: int = 64
) -> str:
    """Write an adapter whose weights follow from the seed, large enough that every token depends on it.

    Args:
        hidden, layers, heads, kv_heads, head_dim: of the model (those of ``scripts/seeded_model.py`` by default).
    """
    random = torch.Generator().manual_seed(seed)
    weights = {}
    modules = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    for layer in range(layers):
        for name, num_heads in modules.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=random) / hidden**0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(num_heads * head_dim, RANK, generator=random) * 0.3
    path.mkdir(exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": list(modules)}
    config |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "seeded"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)
