"""An object is not stored in the format of ``torch.save``.

The attacker wants to reach the other readers behind ``torch.load``: for the old format, for
TorchScript programs, or for compressed archives, which expand kilobytes to gigabytes.
"""

from __future__ import annotations

import io
import pickle
import zipfile

import pytest
import torch

from tests.attacks.support import Attack, Checkpoint, record_of_object, with_entry
from torch_ckpt import Corrupt, Unsafe

BOMB_BYTES = 1 << 30


def old_format(c: Checkpoint) -> None:
    stream = io.BytesIO()
    torch.save(c.make_payload(), stream, _use_new_zipfile_serialization=False)
    c.replace_record("step", stream.getvalue())


def bare_pickle(c: Checkpoint) -> None:
    c.replace_record("step", pickle.dumps(c.make_payload()))


class Module(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def torch_script(c: Checkpoint) -> None:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(Module()), stream)
    c.replace_record("step", stream.getvalue())


def compressed(c: Checkpoint) -> None:
    stream = io.BytesIO()
    value = pickle.dumps(b"", 2)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", value)
        archive.writestr("archive/byteorder", b"little")
        with archive.open("archive/data/0", "w") as entry:
            for _ in range(BOMB_BYTES >> 20):
                entry.write(bytes(1 << 20))
        archive.writestr("archive/version", b"3\n")
    c.replace_record("step", stream.getvalue())


def two_programs(c: Checkpoint) -> None:
    # Readers find either the first or the last entry of the name.
    good, bad = record_of_object(7), record_of_object(c.make_payload())
    with zipfile.ZipFile(io.BytesIO(bad)) as archive:
        program = archive.read("archive/data.pkl")
    stream = io.BytesIO(good)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("archive/data.pkl", program)
    c.replace_record("step", stream.getvalue())


def archive_before_archive(c: Checkpoint) -> None:
    # Readers start either at the front or at the directory at the end.
    c.replace_record("step", record_of_object(7) + record_of_object(c.make_payload()))


def big_endian(c: Checkpoint) -> None:
    c.replace_record("step", with_entry(record_of_object((torch.ones(2),)), "byteorder", b"big"))


ATTACKS: dict[str, Attack] = {
    "object: the format before zip": old_format,
    "object: a bare pickle": bare_pickle,
    "object: a TorchScript program": torch_script,
    "object: a zip bomb": compressed,
    "object: two programs in one archive": two_programs,
    "object: an archive before the archive": archive_before_archive,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, Corrupt, ls=0, message="step: the object in")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.record_stock(attack)


def test_the_other_byte_order_is_rejected(checkpoint: Checkpoint) -> None:
    # Not an attack, but the values would be wrong.
    big_endian(checkpoint)
    checkpoint.assert_stopped("object: byte order", Corrupt, ls=0, message="byte order")
