"""The exchange file: stored chunks as safetensors, with all that it takes to store them again.

A safetensors file is a little-endian length, a JSON header of that length (which may end in spaces), and the tensors'
bytes. Here a tensor is a chunk: its name is the key in hex, its type U8, its bytes the payload. ``__metadata__`` has
``format`` (``tierkv-export-1``), ``namespace`` (its description, canonical JSON) and ``chunks`` (a JSON list, ancestors
first, of :class:`Chunk`). Any reader of safetensors reads the payloads; what they mean is in the namespace's layout.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from tierkv.errors import ConfigError
from tierkv.keys import KEY_NBYTES
from tierkv.layout import Namespace
from tierkv.payload import HEADER_NBYTES, BadRecordError, Header, checksum, open_record

FORMAT = "tierkv-export-1"
#: What readers of safetensors take.
MAX_HEADER_NBYTES = 100_000_000
_LENGTH = struct.Struct("<Q")


class Chunk(msgspec.Struct, frozen=True):
    """What a record's header says beside its payload; bytes in hex. ``tokens`` are packed token ids, or empty."""

    key: str
    parent: str
    anchor: str
    position: int
    num_tokens: int
    tenant: str
    created: float
    checksum: str
    tokens: str = ""


class Writer:
    """Writes an exchange file. It has its name only when it is complete.

    Args:
        path: the file; one that is there is replaced.
        namespace: of the chunks.
        num_chunks: how many will be written at most: the header's room is made first.

    Raises:
        OSError: the file cannot be written.
        ConfigError: too many chunks for one file.
    """

    def __init__(self, path: Path, namespace: Namespace, num_chunks: int) -> None:
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._namespace = namespace
        self._chunks: list[Chunk] = []
        longest = Chunk(
            "0" * 64,
            "0" * 64,
            "0" * 64,
            2**32,
            2**32,
            "0" * 32,
            -1.2345678901234567e-300,
            "0" * 32,
            "0" * (8 * namespace.layout.chunk_tokens),
        )
        each = len(json.dumps(json.dumps(msgspec.to_builtins(longest)))) + 2 + 200  # and its row among the tensors
        self._room = -(-(len(self._header([])) + num_chunks * each) // 8) * 8
        if self._room > MAX_HEADER_NBYTES:
            raise ConfigError(f"{num_chunks:,} chunks are too many for one file; export shorter prefixes apart")
        self._file: BinaryIO = self._part.open("wb")
        self._file.seek(_LENGTH.size + self._room)

    def add(self, record: memoryview) -> None:
        """Add a record: header, payload, packed token ids.

        Raises:
            BadRecordError: it is not sound, or of another namespace.
            OSError: the disk is full.
        """
        nbytes = self._namespace.payload_nbytes
        head = Header.unpack(record)
        open_record(record, key=head.key, ns_id=self._namespace.ns_id(), payload_nbytes=nbytes)
        payload = record[HEADER_NBYTES : HEADER_NBYTES + nbytes]
        if checksum(payload) != head.checksum:
            raise BadRecordError(f"the payload of key {head.key.hex()[:16]} does not match its checksum")
        self._file.write(payload)
        self._chunks.append(
            Chunk(
                key=head.key.hex(),
                parent=head.parent.hex(),
                anchor=head.anchor.hex(),
                position=head.position,
                num_tokens=head.num_tokens,
                tenant=head.tenant.hex(),
                created=head.created,
                checksum=head.checksum.hex(),
                tokens=bytes(record[HEADER_NBYTES + nbytes :]).hex(),
            )
        )

    def finish(self) -> None:
        """Write the header and give the file its name.

        Raises:
            OSError: the disk is full.
        """
        header = self._header(self._chunks).ljust(self._room)
        self._file.seek(0)
        self._file.write(_LENGTH.pack(len(header)) + header)
        self._file.close()
        self._part.replace(self._path)

    def give_up(self) -> None:
        """Leave no file behind. Nothing happens after :meth:`finish`."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _header(self, chunks: Sequence[Chunk]) -> bytes:
        nbytes = self._namespace.payload_nbytes
        metadata = {
            "format": FORMAT,
            "namespace": self._namespace.to_json().decode(),
            "chunks": json.dumps(msgspec.to_builtins(chunks)),
        }
        tensors = {
            chunk.key: {"dtype": "U8", "shape": [nbytes], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
            for i, chunk in enumerate(chunks)
        }
        return json.dumps({"__metadata__": metadata} | tensors).encode()


class Reader:
    """Reads an exchange file, and takes nothing in it on trust.

    Raises:
        ConfigError: it cannot be read, or is no exchange file.
    """

    def __init__(self, path: Path) -> None:
        self._what = f"{str(path)!r}"
        try:
            self._file: BinaryIO = path.open("rb")
            try:
                self._open()
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise ConfigError(f"{self._what} cannot be read: {error.strerror}; name a file that you can read") from None

    def _open(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        head = self._file.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        if not 2 <= length <= min(MAX_HEADER_NBYTES, size - _LENGTH.size):
            raise self._error("it is no safetensors file, or is cut off")
        try:
            header = json.loads(self._file.read(length))
            metadata = header.pop("__metadata__")
            if metadata.get("format") != FORMAT:
                raise self._error(f"its format is {metadata.get('format')!r}; this program reads {FORMAT!r}")
            self.namespace = Namespace.from_json(metadata["namespace"].encode())
            self.chunks = msgspec.json.decode(metadata["chunks"], type=list[Chunk])
        except (ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
            raise self._error(f"its header is not understood ({type(error).__name__}: {error})") from None
        self._at = _LENGTH.size + length
        nbytes = self.namespace.payload_nbytes
        if len({chunk.key for chunk in self.chunks}) < len(self.chunks) or len(header) != len(self.chunks):
            raise self._error("its chunks and its tensors are not the same")
        for i, chunk in enumerate(self.chunks):
            row = {"dtype": "U8", "shape": [nbytes], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
            if header.get(chunk.key) != row:
                raise self._error(f"tensor {chunk.key[:12]} is not a payload of {nbytes} bytes in its place")
        if size != self._at + nbytes * len(self.chunks):
            raise self._error("it is cut off, or has bytes that belong to no chunk")

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"{self._what} is not what 'tierkv export' writes: {why}")

    def records(self) -> Iterator[bytes]:
        """Yield the records, ancestors first: header, payload, packed token ids. Each is verified.

        Raises:
            ConfigError: one is damaged.
        """
        layout_id, ns_id = self.namespace.layout.layout_id(), self.namespace.ns_id()
        nbytes = self.namespace.payload_nbytes
        for i, chunk in enumerate(self.chunks):
            self._file.seek(self._at + i * nbytes)
            payload = self._file.read(nbytes)
            if len(payload) != nbytes or checksum(payload).hex() != chunk.checksum:
                raise self._error(f"the payload of chunk {chunk.key[:12]} does not match its checksum")
            try:
                header = Header(
                    layout_id=layout_id,
                    ns_id=ns_id,
                    key=_key(chunk.key),
                    parent=_key(chunk.parent),
                    anchor=_key(chunk.anchor),
                    position=chunk.position,
                    num_tokens=chunk.num_tokens,
                    tenant=_key(chunk.tenant, 16),
                    created=chunk.created,
                    raw_nbytes=nbytes,
                    checksum=_key(chunk.checksum, 16),
                ).pack()
                tokens = bytes.fromhex(chunk.tokens)
            except (ValueError, struct.error) as error:
                raise self._error(f"chunk {chunk.key[:12]} is described wrongly ({error})") from None
            yield header + payload + tokens

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _key(digits: str, nbytes: int = KEY_NBYTES) -> bytes:
    value = bytes.fromhex(digits)
    if len(value) != nbytes:
        raise ValueError(f"{digits[:16]!r} is not {nbytes} bytes in hex")
    return value
