"""The identity of the model that an engine runs, read from vLLM's configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import Any

from tierkv.config import default_disk_dir
from tierkv.identity import FileHashes, directory_digests, identity_digest

logger = logging.getLogger("tierkv")

#: Weights that are not read from files on this machine, or not as they are there.
_NO_FILES = ("dummy", "tensorizer", "runai_streamer", "runai_streamer_sharded", "sharded_state")


class UnknownIdentityError(Exception):
    """The weights cannot be named by their content; the message says why."""


def resolve_identity(vllm_config: Any, weights_are_named: bool = False) -> bytes:
    """Return the 32-byte identity of the engine's model. Reads every weight file that is not remembered.

    Args:
        weights_are_named: a ``weights_version`` tells the weights, where no file does.

    Raises:
        UnknownIdentityError: the weights cannot be named by their content.
    """
    model = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format))
    if load_format in _NO_FILES:
        if weights_are_named:
            return identity_digest({}, _settings(vllm_config) | {"weights": "named", "config": _plain(_config(model))})
        raise UnknownIdentityError(f"load_format={load_format!r} does not read the weights from files")
    hashes = FileHashes(hashes_path())
    try:
        files = directory_digests(_directory(model), hashes)
    except (OSError, ValueError) as error:
        raise UnknownIdentityError(str(error)) from None
    hashes.save()
    return identity_digest(files, _settings(vllm_config))


def hashes_path() -> Path:
    """Return the file in which the digests of this user's model files are remembered."""
    return default_disk_dir() / "identity.json"


def lora_settings(vllm_config: Any) -> dict[str, Any]:
    """Return what besides an adapter's files decides what it does to the KV, as plain values."""
    lora = getattr(vllm_config, "lora_config", None)
    return {"dtype": str(getattr(lora, "lora_dtype", None))} if lora is not None else {}


def item_settings(vllm_config: Any) -> dict[str, Any] | str | None:
    """Return what besides an item decides what the encoder makes of it, as plain values.

    What is off is left out, so that versions of vLLM that do not know it agree. A text says why items cannot be told;
    None: the model takes none.
    """
    mm = getattr(vllm_config.model_config, "multimodal_config", None)
    if mm is None:
        return None
    if str(getattr(mm, "mm_processor_cache_type", "")) == "shm":
        return "with mm_processor_cache_type='shm' the items do not come to vLLM's scheduler; use 'lru'"
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        return "what the encoder makes of an item comes from another engine (ec_transfer_config)"
    scales = getattr(mm, "mm_encoder_fp8_scale_path", None)
    if getattr(mm, "mm_encoder_attn_dtype", None) and not scales:
        return "mm_encoder_attn_dtype without mm_encoder_fp8_scale_path: scales follow from earlier items"
    rate = getattr(mm, "video_pruning_rate", None)
    lora = getattr(vllm_config, "lora_config", None)
    settings: dict[str, Any] = {
        "mm_processor_kwargs": _plain(getattr(mm, "mm_processor_kwargs", None)),
        "mm_encoder_attn_dtype": getattr(mm, "mm_encoder_attn_dtype", None),
        "mm_encoder_fp8_scales": hashlib.sha256(Path(scales).read_bytes()).digest() if scales else None,
        "video_pruning_rate": float(rate) if rate else None,
        "video_pruning_method": str(getattr(mm, "video_pruning_method", "evs")) if rate else None,
        "enable_tower_connector_lora": bool(getattr(lora, "enable_tower_connector_lora", False)),
    }
    return {name: value for name, value in settings.items() if value}


def _directory(model: Any) -> Path:
    """Return the directory of the model's files: as given, or its snapshot in the hub's cache."""
    path = Path(model.model)
    if path.is_file():
        path = path.parent
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception as error:
        raise ValueError(f"the files of {model.model!r} are not on this machine: {error}") from None


def _settings(vllm_config: Any) -> dict[str, Any]:
    """Return what besides the files decides the KV of a prompt, as plain values.

    Of options that few use, those that are not used are left out, so that versions of vLLM that lack them agree.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    rare = {
        "quantization_config": _plain(_fields_of(getattr(model, "quantization_config", None))),
        "config": _plain(_config(model)) if getattr(model, "hf_config_path", None) else None,
        "model_class_overrides": _plain(getattr(model, "model_class_overrides", None)),
    }
    return {name: value for name, value in rare.items() if value} | {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "hf_overrides": _plain(getattr(model, "hf_overrides", None)),
        "rope_parameters": _plain(getattr(model.hf_text_config, "rope_parameters", None)),
        "cache_dtype": str(cache.cache_dtype),
        "sliding_window": getattr(cache, "sliding_window", None),
        "disable_sliding_window": bool(getattr(model, "disable_sliding_window", False)),
    }


def _fields_of(value: Any) -> Any:
    """Return the fields of a dataclass that say something, and anything else as it is."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return {name: field for name, field in dataclasses.asdict(value).items() if field}


def _config(model: Any) -> dict[str, Any]:
    """Return the model's configuration without what says where it is and by what it was written."""
    config: dict[str, Any] = model.hf_config.to_dict()
    return {name: value for name, value in config.items() if name not in ("_name_or_path", "transformers_version")}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
