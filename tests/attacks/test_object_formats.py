"""An object is stored in another form than ``torch.save`` gives it.

The attacker wants one of the other readers behind ``torch.load``: that of the old format, that of
TorchScript programs, or that of compressed archives, which makes gigabytes of kilobytes.
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
    torch.save(c.touches_canary(), stream, _use_new_zipfile_serialization=False)
    c.replace_record("step", stream.getvalue())


def bare_pickle(c: Checkpoint) -> None:
    c.replace_record("step", pickle.dumps(c.touches_canary()))


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
    # One for whoever looks for the first entry of the name, one for whoever looks for the last.
    good, bad = record_of_object(7), record_of_object(c.touches_canary())
    with zipfile.ZipFile(io.BytesIO(bad)) as archive:
        program = archive.read("archive/data.pkl")
    stream = io.BytesIO(good)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("archive/data.pkl", program)
    c.replace_record("step", stream.getvalue())


def archive_before_archive(c: Checkpoint) -> None:
    # One for whoever reads from the front, one for whoever looks for the directory at the end.
    c.replace_record("step", record_of_object(7) + record_of_object(c.touches_canary()))


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
def test_it_is_refused(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, Corrupt, ls=0, says="step: the object in")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_what_stock_does(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.note_stock(attack)


def test_the_other_byte_order_is_refused(checkpoint: Checkpoint) -> None:
    # Not an attack: read as it is, it would be other numbers.
    big_endian(checkpoint)
    checkpoint.assert_stopped("object: byte order", Corrupt, ls=0, says="byte order")
