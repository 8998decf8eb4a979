"""Small metadata uses much memory or much time.

The attacker wants the loading machine to hang or to die. The metadata must be rejected at a cost
that its size bounds.
"""

from __future__ import annotations

import struct

import pytest

from tests.attacks.support import Attack, Checkpoint
from torch_ckpt import CheckpointError, Corrupt, Unsafe

DOUBLINGS = 60
DEPTH = 1_000_000
PAIRS = 100_000

_METADATA = b"torch.distributed.checkpoint.metadata"
_FILESYSTEM = b"torch.distributed.checkpoint.filesystem"


def text(value: bytes) -> bytes:
    """Returns the opcode of a text."""
    return b"X" + struct.pack("<I", len(value)) + value


def dict_of(*parts: bytes) -> bytes:
    """Returns the pickle program of a dict, from alternating keys and values."""
    return b"}(" + b"".join(parts) + b"u"


def instance(module: bytes, name: bytes, *parts: bytes) -> bytes:
    """Returns the pickle program of an object with these attributes."""
    return b"c" + module + b"\n" + name + b"\n)\x81" + dict_of(*parts) + b"b"


def metadata(*parts: bytes) -> bytes:
    """Returns a complete pickle program that makes torch's Metadata."""
    return b"\x80\x04" + instance(_METADATA, b"Metadata", *parts) + b"."


def key(name: bytes) -> bytes:
    """Returns a key of storage_data."""
    return instance(_METADATA, b"MetadataIndex", text(b"fqn"), name, text(b"offset"), b"N")


def location(file: bytes) -> bytes:
    """Returns the location of an empty record in a file."""
    parts = text(b"relative_path"), file, text(b"offset"), b"K\0", text(b"length"), b"K\0"
    return instance(_FILESYSTEM, b"_StorageInfo", *parts)


# The name of a record is the program's first opcode, as pickle protocols 0 and 1 allow.
TEXT_AT_BYTE_0 = b"".join(
    [
        text(_METADATA) + b"\x94" + text(b"Metadata") + b"\x93)\x81}(",
        text(b"state_dict_metadata") + b"}",
        text(b"storage_data") + dict_of(key(b"h\0"), location(text(b"x"))),
        b"ub.",
    ]
)


def one_table_of_many_pairs(c: Checkpoint) -> None:
    # The table of one file, many times.
    file, table = b"h\0", b"B" + struct.pack("<I", 400_000) + bytes(400_000) + b"\x94"
    c.publish_bytes(
        metadata(
            text(b"storage_data"),
            dict_of(key(text(b"name")), location(text(b"x") + b"\x94")),
            text(b"state_dict_metadata"),
            b"}",
            text(b"torch_ckpt"),
            dict_of(
                text(b"version"), b"K\1", text(b"checksums"),
                dict_of(file + table, (file + b"h\1") * PAIRS),
            ),
        )
    )  # fmt: skip


def one_table_of_many_files(c: Checkpoint) -> None:
    # All files share the bytes of one table.
    files = [text(b"%d" % number) + b"\x94" for number in range(5000)]
    table = b"B" + struct.pack("<I", 200_000) + bytes(200_000) + b"\x94"
    fetched = [b"j" + struct.pack("<I", number) for number in range(len(files))]
    tables = [fetched[0] + table] + [f + b"j" + struct.pack("<I", len(files)) for f in fetched[1:]]
    c.publish_bytes(
        metadata(
            text(b"storage_data"),
            dict_of(*(key(text(b"n")) + location(file) for file in files)),
            text(b"state_dict_metadata"),
            b"}",
            text(b"torch_ckpt"),
            dict_of(text(b"version"), b"K\1", text(b"checksums"), dict_of(*tables)),
        )
    )


def long_names(name_bytes: int) -> Attack:
    def attack(c: Checkpoint) -> None:
        # Many records with one long name, which the metadata does not describe.
        first = key(text(b"n" * name_bytes) + b"\x94") + b"\x94" + location(text(b"x")) + b"\x94"
        storage = dict_of(first, b"h\1h\2" * PAIRS)
        c.publish_bytes(
            metadata(text(b"state_dict_metadata"), b"}", text(b"storage_data"), storage)
        )

    return attack


def one_long_name_of_many_entries(c: Checkpoint) -> None:
    stored = b"c" + _METADATA + b"\nBytesStorageMetadata\n)\x81\x94"
    first = text(b"n" * 500_000) + b"\x94" + stored
    c.publish_bytes(metadata(text(b"state_dict_metadata"), dict_of(first, b"h\0h\1" * PAIRS)))


def doubling_key(c: Checkpoint) -> None:
    # ((..., ...), (..., ...)) with shared parts, as the key of a dict: a hash takes 2**60 steps.
    c.publish_bytes(b"\x80\x04}K\x01" + b"q\x00h\x00\x86" * DOUBLINGS + b"K\x01s.")


def deep_key(c: Checkpoint) -> None:
    # Its hash recurses a million times.
    c.publish_bytes(b"\x80\x04})" + b"\x85" * DEPTH + b"K\x01s.")


ATTACKS: dict[str, Attack] = {
    "metadata: BINBYTES8 of 1 TiB": lambda c: c.publish_bytes(
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"."
    ),
    "metadata: BINUNICODE8 of 2**63": lambda c: c.publish_bytes(
        b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"."
    ),
    "metadata: a frame of 1 TiB": lambda c: c.publish_bytes(
        b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N."
    ),
    "metadata: deep nesting": lambda c: c.publish_bytes(
        b"\x80\x04" + b")" + b"\x85" * DEPTH + b"."
    ),
    "metadata: open marks": lambda c: c.publish_bytes(b"\x80\x04" + b"(" * DEPTH + b"."),
}

# torch's reader makes dicts of these, with fewer entries than the pickle has pairs.
REPEATED: dict[str, Attack] = {
    "metadata: a text at byte 0": lambda c: c.publish_bytes(TEXT_AT_BYTE_0),
    "metadata: one table of many pairs": one_table_of_many_pairs,
    "metadata: one table of many files": one_table_of_many_files,
    "metadata: records of one long name": long_names(500_000),
    "metadata: records of one name of 60 KB": long_names(60_000),
    "metadata: one long name of many entries": one_long_name_of_many_entries,
}

# Only the verifier stops these. Otherwise they would use up the memory or the stack of the process.
VERIFIED: dict[str, Attack] = {
    "metadata: memo index 2**31": lambda c: c.publish_bytes(b"\x80\x04Nr\x00\x00\x00\x80."),
    "metadata: doubling tuples as a key": doubling_key,
    "metadata: deep tuples as a key": deep_key,
}

ALL = ATTACKS | REPEATED | VERIFIED


@pytest.mark.parametrize("attack", ALL)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    ALL[attack](checkpoint)
    checkpoint.assert_stopped(attack, Corrupt, Unsafe, CheckpointError)


@pytest.mark.parametrize("attack", ALL)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ALL[attack](checkpoint)
    checkpoint.record_stock(attack)
