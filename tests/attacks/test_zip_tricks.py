"""A tensor's record is a manipulated archive.

The attacker wants kilobytes to become gigabytes (by compression or overlapping entries), or 64-bit
sizes and offsets to wrap around.
"""

from __future__ import annotations

import io
import struct
import zipfile

import pytest
import torch

from tests.attacks.support import Attack, Checkpoint
from tests.support import record_of
from torch_ckpt import Corrupt

TENSOR = torch.arange(12.0).reshape(3, 4)
BIG = (2**14, 2**14)  # 1 GiB


def entry_at(record: bytes, name: str) -> int:
    """Returns the offset of a name's entry in the directory."""
    return record.rindex(f"archive/{name}".encode()) - 46


def patched(record: bytes, at: int, format: str, *values: int) -> bytes:
    content = bytearray(record)
    struct.pack_into(format, content, at, *values)
    return bytes(content)


def compressed_payload(c: Checkpoint) -> None:
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(record_of(TENSOR))) as old,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    c.replace_record("weight", stream.getvalue())


def zip_bomb(c: Checkpoint) -> None:
    # The metadata has the same shape, so only the bytes do not fit.
    record = record_of(torch.zeros(BIG[0], 1).expand(BIG)[:1])
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(record)) as old:
        program = old.read("archive/data.pkl")
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr("archive/data.pkl", program)
        new.writestr("archive/byteorder", b"little")
        with new.open("archive/data/0", "w") as entry:
            for _ in range(256):
                entry.write(bytes(1 << 20))
        new.writestr("archive/version", b"3\n")
    c.replace_record("weight", stream.getvalue())


def stored_size_is_not_the_size(c: Checkpoint) -> None:
    record = record_of(TENSOR)
    at = entry_at(record, "data/0")
    c.replace_record("weight", patched(record, at + 24, "<I", 2**31))


def payload_over_the_directory(c: Checkpoint) -> None:
    record = record_of(TENSOR)
    at = entry_at(record, "data/0")
    # The entry has the header offset of data.pkl.
    c.replace_record("weight", patched(record, at + 42, "<I", 0))


def header_past_the_end(c: Checkpoint) -> None:
    record = record_of(TENSOR)
    at = entry_at(record, "data/0")
    c.replace_record("weight", patched(record, at + 42, "<I", 2**32 - 2))


def zip64_sizes_that_wrap(c: Checkpoint) -> None:
    # torch's record at the end has the directory's offset and size in 64 bits.
    record = record_of(TENSOR)
    at = record.rindex(b"PK\x06\x06")
    c.replace_record("weight", patched(record, at + 40, "<QQ", 2**64 - 8, 16))


def zip64_count(c: Checkpoint) -> None:
    record = record_of(TENSOR)
    at = record.rindex(b"PK\x06\x06")
    c.replace_record("weight", patched(record, at + 24, "<QQ", 2**63, 2**63))


def two_payloads(c: Checkpoint) -> None:
    stream = io.BytesIO(record_of(TENSOR))
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("archive/data/0", bytes(48))
    c.replace_record("weight", stream.getvalue())


ATTACKS: dict[str, Attack] = {
    "zip: a compressed payload": compressed_payload,
    "zip: a bomb": zip_bomb,
    "zip: a size that is not stored": stored_size_is_not_the_size,
    "zip: the payload over another entry": payload_over_the_directory,
    "zip: a header past the end": header_past_the_end,
    "zip64: offset and size wrap around": zip64_sizes_that_wrap,
    "zip64: 2**63 entries": zip64_count,
    "zip: two payloads": two_payloads,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Corrupt, ls=0, unchanged=False, message="weight: ")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.record_stock(attack)
