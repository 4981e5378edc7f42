"""Model identity: the bytes of a model's files, hashed once, and the settings that change its KV."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv import identity
from tierkv.identity import FileHashes, directory_digests, identity_digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"weights 1" * 1000)
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"weights 2" * 1000)
    (directory / "config.json").write_text('{"hidden_size": 64}')
    (directory / "quantization_config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("# model")
    return directory


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once."""
    monkeypatch.setattr(identity, "_SETTLED_S", -1.0)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "hashes.json"


def digest_of(directory: Path, memory: Path) -> bytes:
    hashes = FileHashes(memory)
    found = identity_digest(directory_digests(directory, hashes), {"dtype": "bfloat16"})
    hashes.save()
    return found


def test_golden() -> None:
    files = {"config.json": "aa" * 32, "model.safetensors": "bb" * 32}
    body = b'{"files":{"config.json":"%s","model.safetensors":"%s"},"settings":{"dtype":"bfloat16"}}'
    expected = hashlib.sha256(b"tierkv-identity-1:" + body % (b"aa" * 32, b"bb" * 32)).digest()
    assert identity_digest(files, {"dtype": "bfloat16"}) == expected
    assert identity_digest(dict(reversed(files.items())), {"dtype": "bfloat16"}) == expected


def test_files_are_named_by_their_bytes(model: Path, memory: Path) -> None:
    found = directory_digests(model, FileHashes(memory))
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(found) == [*names, "quantization_config.json"]  # neither the tokenizer nor the README
    for name, digest in found.items():
        assert digest == hashlib.sha256((model / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json", "quantization_config.json"])
def test_new_bytes_of_the_same_size_under_the_same_path_are_another_model(model: Path, memory: Path, name: str) -> None:
    before = digest_of(model, memory)
    data = bytearray((model / name).read_bytes())
    data[len(data) // 2] ^= 1
    path, stat = model / name, (model / name).stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as some copying tools do: ctime still tells
    assert path.stat().st_size == stat.st_size
    assert digest_of(model, memory) != before


def test_two_fine_tunes_with_equal_headers_and_sizes_are_two_models(model: Path, memory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    assert digest_of(other, memory) == digest_of(model, memory)  # a copy is the same model
    weights = other / "model-00001-of-00002.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"2")
    assert digest_of(other, memory) != digest_of(model, memory)


def test_what_tokenizes_is_no_part_of_a_model(model: Path, memory: Path) -> None:
    before = digest_of(model, memory)
    (model / "tokenizer.json").write_text('{"changed": 1}')
    (model / "README.md").unlink()
    assert digest_of(model, memory) == before


@pytest.mark.usefixtures("settled")
def test_a_file_is_hashed_once(model: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of(model, memory)
    read: list[Path] = []
    hash_file = identity._hash_file
    monkeypatch.setattr(identity, "_hash_file", lambda path: read.append(path) or hash_file(path))
    assert digest_of(model, memory) == before  # another process, the same memory
    assert read == []
    (model / "config.json").write_text('{"hidden_size": 65}')
    digest_of(model, memory)
    assert read == [model / "config.json"]


def test_a_file_that_changes_while_it_is_read_is_an_error(
    model: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_file = identity._hash_file

    def meddle(path: Path) -> str:
        digest = hash_file(path)
        path.write_bytes(b"new")
        return digest

    monkeypatch.setattr(identity, "_hash_file", meddle)
    hashes = FileHashes(memory)
    with pytest.raises(OSError, match="changed while it was read"):
        hashes.digest(model / "config.json")
    monkeypatch.undo()
    assert hashes.digest(model / "config.json") == hashlib.sha256(b"new").hexdigest()


@pytest.mark.usefixtures("settled")
def test_blobs_of_a_hub_snapshot_carry_their_hash(tmp_path: Path, memory: Path) -> None:
    name = hashlib.sha256(b"whatever").hexdigest()
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / name).write_bytes(b"whatever")
    (blobs / ("ab" * 20)).write_bytes(b"{}")  # small files are named by their git hash, which is another one
    (snapshot / "model.safetensors").symlink_to(blobs / name)
    (snapshot / "config.json").symlink_to(blobs / ("ab" * 20))
    hashes = FileHashes(memory)
    assert directory_digests(snapshot, hashes) == {
        "model.safetensors": name,
        "config.json": hashlib.sha256(b"{}").hexdigest(),
    }
    assert hashes.num_hashed == 1


def test_a_directory_without_weights_has_no_identity(tmp_path: Path, memory: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no weight files"):
        directory_digests(tmp_path, FileHashes(memory))


def test_a_file_that_has_just_changed_is_not_remembered(model: Path, memory: Path) -> None:
    """It may change again without a new time stamp."""
    hashes = FileHashes(memory)
    directory_digests(model, hashes)
    hashes.save()
    assert hashes.num_hashed == 0
    assert not memory.exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"files": null}', '{"files": []}', '{"files": 3}'])
def test_a_damaged_memory_is_forgotten(model: Path, memory: Path, content: str) -> None:
    memory.parent.mkdir()
    memory.write_text(content)
    assert len(digest_of(model, memory)) == 32
    assert len(json.loads(memory.read_text())["files"]) == 4
    assert [path.name for path in memory.parent.iterdir()] == [memory.name]  # nothing half-written


@pytest.mark.usefixtures("settled")
def test_a_memory_that_cannot_be_written_is_no_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert len(digest_of(model, tmp_path / "file" / "hashes.json")) == 32


texts = st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=4)


@given(texts, texts, texts, texts)
def test_files_and_settings_do_not_run_into_each_other(
    files: dict[str, str], settings: dict[str, str], other_files: dict[str, str], other_settings: dict[str, str]
) -> None:
    one, other = identity_digest(files, settings), identity_digest(other_files, other_settings)
    assert (one == other) == ((files, settings) == (other_files, other_settings))
    assert len(one) == 32
