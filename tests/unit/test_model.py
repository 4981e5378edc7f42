"""The identity of an engine's model: the files, and the settings of vLLM that change what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierkv.identity import FileHashes, directory_digests, identity_digest
from tierkv_connector.model import UnknownIdentityError, hashes_path, resolve_identity

pytest.importorskip("vllm")
from vllm.config.quantization import QuantizationConfigArgs


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember digests of files in the test's directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights" * 1000)
    (directory / "config.json").write_text("{}")
    return directory


def config(files: Path, *, load_format: str = "auto", cache_dtype: str = "auto", **more: Any) -> Any:
    """vLLM's configuration, as far as the identity reads it."""
    hf_config = SimpleNamespace(to_dict=lambda: {"hidden_size": 64, "_name_or_path": str(files)})
    model = {
        "model": str(files),
        "dtype": "torch.bfloat16",
        "quantization": None,
        "hf_overrides": {},
        "hf_text_config": SimpleNamespace(rope_parameters={"rope_theta": 1e4}),
        "hf_config": hf_config,
        "quantization_config": None,
        "hf_config_path": None,
        "model_class_overrides": {},
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**model | more),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, sliding_window=None),
        load_config=SimpleNamespace(load_format=load_format),
    )


def test_what_few_use_is_left_out_where_it_is_not_used(files: Path) -> None:
    """An identity is a part of every key: it stays what it was, and versions of vLLM without an option agree."""
    settings = {
        "dtype": "torch.bfloat16",
        "quantization": "None",
        "hf_overrides": {},
        "rope_parameters": {"rope_theta": 1e4},
        "cache_dtype": "auto",
        "sliding_window": None,
        "disable_sliding_window": False,
    }
    expected = identity_digest(directory_digests(files, FileHashes(hashes_path())), settings)
    assert resolve_identity(config(files)) == expected
    old = config(files)
    for name in ("quantization_config", "hf_config_path", "model_class_overrides"):
        delattr(old.model_config, name)
    assert resolve_identity(old) == expected
    assert resolve_identity(config(files, quantization_config=QuantizationConfigArgs())) == expected


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_theta": 5e5}},
        {"hf_text_config": SimpleNamespace(rope_parameters={"rope_theta": 5e5})},
        {"disable_sliding_window": True},
        {"cache_dtype": "fp8_e4m3"},
        {"cache_dtype": "fp8_e5m2"},
        {"quantization_config": {"linear": "fp8"}},
        {"quantization_config": QuantizationConfigArgs(ignore=["lm_head"])},
        {"quantization_config": QuantizationConfigArgs(ignore=["model.layers.0.mlp"])},
        {"hf_config_path": "elsewhere"},
        {"model_class_overrides": {"LlamaForCausalLM": "my.module:Llama"}},
    ],
)
def test_a_setting_that_changes_the_kv_changes_the_identity(files: Path, more: dict[str, Any]) -> None:
    assert resolve_identity(config(files, **more)) != resolve_identity(config(files))


def test_two_values_of_a_setting_are_two_identities(files: Path) -> None:
    rows = [
        [{"cache_dtype": name} for name in ("auto", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")],
        [{"quantization_config": QuantizationConfigArgs(ignore=[name])} for name in ("a", "b")],
        [{"hf_config_path": "x", "hf_config": SimpleNamespace(to_dict=lambda n=n: {"n": n})} for n in (1, 2)],
    ]
    for row in rows:
        assert len({resolve_identity(config(files, **more)) for more in row}) == len(row)


def test_scales_in_the_checkpoint_are_a_part_of_the_identity(files: Path) -> None:
    before = resolve_identity(config(files))
    (files / "model.safetensors").write_bytes(b"weights" * 999 + b"k_scale")  # as many bytes as before
    assert resolve_identity(config(files)) != before
    (files / "kv_cache_quant.json").write_text(json.dumps({"k_scale": 0.5}))
    with_scales = resolve_identity(config(files))
    (files / "kv_cache_quant.json").write_text(json.dumps({"k_scale": 0.25}))
    assert resolve_identity(config(files)) != with_scales


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "runai_streamer", "sharded_state"])
def test_weights_that_are_not_read_from_files_have_no_identity_unless_named(files: Path, load_format: str) -> None:
    with pytest.raises(UnknownIdentityError, match=load_format):
        resolve_identity(config(files, load_format=load_format))
    named = resolve_identity(config(files, load_format=load_format), weights_are_named=True)
    assert named != resolve_identity(config(files))
    others = config(files, load_format=load_format, hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 65}))
    assert resolve_identity(others, weights_are_named=True) != named


def test_a_model_that_is_not_here_has_no_identity(tmp_path: Path) -> None:
    with pytest.raises(UnknownIdentityError):
        resolve_identity(config(tmp_path / "gone", revision=None))
