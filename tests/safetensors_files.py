"""Safetensors files for tests, with the checksums that torch_ckpt saves beside them."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

#: The format's dtypes, by name. The library's module for torch does not list the last two.
SAFE_DTYPES: dict[str, torch.dtype] = {
    **safetensors.torch._TYPES,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}

#: Name of the file with the checksums.
CHECKSUMS = "torch_ckpt.checksums"

BLOCK_BYTES = 16 << 10


def header_of(contents: bytes) -> tuple[dict[str, Any], int]:
    """Returns a file's header, and the number of bytes before the data."""
    (length,) = struct.unpack_from("<Q", contents)
    return json.loads(contents[8 : 8 + length]), 8 + length


def _with_crc(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def _table(contents: bytes) -> bytes:
    """Encodes a file's checksum table; see docs/format.md."""
    header, begin = header_of(contents)
    entries, crcs = [], []
    header.pop("__metadata__", None)
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        first, end = (begin + offset for offset in entry["data_offsets"])
        blocks = range(first, end, BLOCK_BYTES)
        if blocks:
            log2 = BLOCK_BYTES.bit_length() - 1
            entries.append(
                struct.pack("<QIB", first, 0, 0x80 | log2) + len(blocks).to_bytes(3, "little")
            )
        crcs += [zlib.crc32(contents[at : min(at + BLOCK_BYTES, end)]) for at in blocks]
    packed = b"".join(entries) + struct.pack(f"<{len(crcs)}I", *crcs)
    return _with_crc(b"TCS1" + struct.pack("<I", len(entries)) + packed)


def write_checksums(files: Iterable[Path]) -> None:
    """Writes the checksums of files in one directory."""
    body = b""
    files = list(files)
    for file in files:
        contents = file.read_bytes()
        _header, begin = header_of(contents)
        for text in (file.name.encode(), None, _table(contents)):
            if text is None:
                body += struct.pack("<QI", len(contents), zlib.crc32(contents[:begin]))
            else:
                body += struct.pack("<I", len(text)) + text
    packed = b"TCF1" + struct.pack("<I", len(files)) + body
    (files[0].parent / CHECKSUMS).write_bytes(_with_crc(packed))


def write_shards(directory: Path, *shards: dict[str, torch.Tensor]) -> list[Path]:
    """Writes files with an index, as Hugging Face does. Returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        safetensors.torch.save_file(shard, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sorted(directory.glob("*.safetensors"))
