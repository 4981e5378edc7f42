"""A small seeded model that takes images, with the processor and the tokenizer that vLLM wants of it.

It is an Idefics3: a tower that makes an embedding of each patch of an image, and a llama. Of the models that vLLM runs
without torchvision it is one whose images may stand anywhere in a prompt, and whose places for an image hold other
tokens too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

VOCAB = 2048
#: Special tokens; those of texts are below them.
_NAMES = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<pad>", "\n")
_SPECIAL = {name: VOCAB - 8 + i for i, name in enumerate((*_NAMES, "<row_1_col_1>", "<row_1_col_2>"))}
IMAGE, PAD = _SPECIAL["<image>"], _SPECIAL["<pad>"]
#: An image is two tiles wide; it is shown to the tower tile by tile, and once as a whole in the size of a tile.
SIDE, PATCH = 112, 14
_TILE_TOKENS = (SIDE // PATCH) ** 2
#: The tokens that an image takes in a prompt: of three tiles, two before each, two line ends, and one after them all.
IMAGE_TOKENS = 3 * (_TILE_TOKENS + 2) + 3
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP = 256, 4, 4, 2, 64, 704
_VISION, _VISION_LAYERS, _VISION_HEADS = 64, 2, 2


def write_idefics(path: Path, seed: int = 3) -> Path:
    """Write the model to a new directory and return it."""
    random = torch.Generator().manual_seed(seed)
    weights = dict(_text_weights(random, "model.text_model."))
    weights["lm_head.weight"] = _normal(random, VOCAB, _HIDDEN, 3.0)
    weights |= _vision_weights(random, "model.vision_model.")
    weights["model.connector.modality_projection.proj.weight"] = _normal(random, _HIDDEN, _VISION, 1.0)
    path.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors")
    for name, content in _configs().items():
        (path / name).write_text(json.dumps(content, indent=1))
    _tokenizer().save(str(path / "tokenizer.json"))
    return path


def _configs() -> dict[str, dict[str, Any]]:
    text = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    vision = {
        "model_type": "idefics3_vision",
        "hidden_size": _VISION,
        "intermediate_size": 2 * _VISION,
        "num_hidden_layers": _VISION_LAYERS,
        "num_attention_heads": _VISION_HEADS,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    return {
        "config.json": {
            "model_type": "idefics3",
            "architectures": ["Idefics3ForConditionalGeneration"],
            "text_config": text,
            "vision_config": vision,
            "image_token_id": IMAGE,
            "pad_token_id": PAD,
            "scale_factor": 1,
            "tie_word_embeddings": False,
            "dtype": "float32",
        },
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": True,
            "size": {"longest_edge": 2 * SIDE},
            "max_image_size": {"longest_edge": SIDE},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.25, 0.25, 0.25],
        },
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": _TILE_TOKENS},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "eos_token": "<pad>",
        },
    }


def _tokenizer() -> Tokenizer:
    names = {f"t{i}": i for i in range(VOCAB - len(_SPECIAL))} | _SPECIAL
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    return tokenizer


def _normal(random: torch.Generator, rows: int, columns: int, gain: float) -> torch.Tensor:
    return torch.randn(rows, columns, generator=random) * (gain / columns**0.5)


def _text_weights(random: torch.Generator, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The llama: sharp attention, so that every token of the prompt shows in what comes after it."""
    yield f"{prefix}embed_tokens.weight", _normal(random, VOCAB, _HIDDEN, _HIDDEN**0.5)
    for layer in range(_LAYERS):
        block = f"{prefix}layers.{layer}"
        yield f"{block}.self_attn.q_proj.weight", _normal(random, _HEADS * _HEAD_DIM, _HIDDEN, 1.6)
        yield f"{block}.self_attn.k_proj.weight", _normal(random, _KV_HEADS * _HEAD_DIM, _HIDDEN, 1.6)
        yield f"{block}.self_attn.v_proj.weight", _normal(random, _KV_HEADS * _HEAD_DIM, _HIDDEN, 1.0)
        yield f"{block}.self_attn.o_proj.weight", _normal(random, _HIDDEN, _HEADS * _HEAD_DIM, 1.0)
        yield f"{block}.mlp.gate_proj.weight", _normal(random, _MLP, _HIDDEN, 1.0)
        yield f"{block}.mlp.up_proj.weight", _normal(random, _MLP, _HIDDEN, 1.0)
        yield f"{block}.mlp.down_proj.weight", _normal(random, _HIDDEN, _MLP, 1.0)
        yield f"{block}.input_layernorm.weight", torch.ones(_HIDDEN)
        yield f"{block}.post_attention_layernorm.weight", torch.ones(_HIDDEN)
    yield f"{prefix}norm.weight", torch.ones(_HIDDEN)


def _vision_weights(random: torch.Generator, prefix: str) -> dict[str, torch.Tensor]:
    patches = _normal(random, _VISION, 3 * PATCH * PATCH, 1.0).view(_VISION, 3, PATCH, PATCH)
    weights = {
        f"{prefix}embeddings.patch_embedding.weight": patches,
        f"{prefix}embeddings.patch_embedding.bias": torch.zeros(_VISION),
        f"{prefix}embeddings.position_embedding.weight": _normal(random, _TILE_TOKENS, _VISION, _VISION**0.5),
    }
    norms, linears = ["post_layernorm"], []
    for layer in range(_VISION_LAYERS):
        block = f"encoder.layers.{layer}"
        norms += [f"{block}.layer_norm1", f"{block}.layer_norm2"]
        linears += [(f"{block}.self_attn.{n}", _VISION, _VISION) for n in ("q_proj", "k_proj", "v_proj", "out_proj")]
        linears += [(f"{block}.mlp.fc1", 2 * _VISION, _VISION), (f"{block}.mlp.fc2", _VISION, 2 * _VISION)]
    for name in norms:
        weights |= {f"{prefix}{name}.weight": torch.ones(_VISION), f"{prefix}{name}.bias": torch.zeros(_VISION)}
    for name, rows, columns in linears:
        weights[f"{prefix}{name}.weight"] = _normal(random, rows, columns, 1.0)
        weights[f"{prefix}{name}.bias"] = torch.zeros(rows)
    return weights


def with_inputs(prompt: list[int], inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a prompt for vLLM with what a test says it has.

    Args:
        prompt: token ids, with one ``IMAGE`` where an image is to be.
        inputs: ``images``, a seed each, with ``uuids`` and ``processor`` (arguments of the image processor); or
            ``embeds``, a seed and a number of rows, with ``zeros`` (rows that are), and ``is_token`` where they stand
            for some of the token ids alone.
    """
    if "images" in inputs:
        request: dict[str, Any] = {
            "prompt_token_ids": prompt,
            "multi_modal_data": {"image": [image(seed) for seed in inputs["images"]]},
        }
        if "uuids" in inputs:
            request["multi_modal_uuids"] = {"image": inputs["uuids"]}
        if "processor" in inputs:
            request["mm_processor_kwargs"] = inputs["processor"]
        return request
    rows = embeddings(*inputs["embeds"])
    rows[inputs.get("zeros", [])] = 0
    if "is_token" not in inputs:
        return {"prompt_embeds": rows}
    is_token = [bool(each) for each in inputs["is_token"]]
    rows[torch.tensor(is_token)] = 0
    return {"prompt_token_ids": prompt, "prompt_embeds": rows, "prompt_is_token_ids": is_token}


def image(seed: int) -> Any:
    """Return an image of noise that follows from the seed."""
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 256, (SIDE, 2 * SIDE, 3), dtype=np.uint8)
    return Image.fromarray(values)


def embeddings(seed: int, num_rows: int, hidden: int = _HIDDEN) -> torch.Tensor:
    """Return rows like those of the models' own embeddings, as they follow from the seed; the first ones of more."""
    random = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(hidden, generator=random) for _ in range(num_rows)])
