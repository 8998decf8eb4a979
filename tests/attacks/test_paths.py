"""The metadata says that data lies outside of the checkpoint's directory.

The attacker wants other files of the machine to be read as weights, which somebody publishes, or to
be opened at all. torch joins the path and opens it.
"""

from __future__ import annotations

import pytest

from tests.attacks.support import Checkpoint
from torch_ckpt import Unsafe

PATHS = {
    "path: ..": "../outside.distcp",
    "path: amid others": "a/../../outside.distcp",
    "path: absolute": "{folder}/outside.distcp",
    "path: two slashes": "//{folder}/outside.distcp",
    "path: the directory": ".",
    "path: empty": "",
    "path: NUL": "__0_0.distcp\0.txt",
    "path: backslashes": "..\\outside.distcp",
    "path: 5,000 bytes": "./" * 2490 + "__0_0.distcp",
    "path: 5,000 bytes in 2,500 characters": "é" * 2500,
}


def spoil(c: Checkpoint, attack: str) -> None:
    c.of_stock()
    (c.folder / "outside.distcp").write_bytes(c.data.read_bytes())
    c.place("weight").relative_path = PATHS[attack].replace("{folder}", str(c.folder))
    c.publish()


@pytest.mark.parametrize("attack", PATHS)
def test_it_is_refused(checkpoint: Checkpoint, attack: str) -> None:
    spoil(checkpoint, attack)
    checkpoint.assert_stopped(attack, Unsafe, says="weight: the metadata places its data in")


@pytest.mark.parametrize("attack", PATHS)
@pytest.mark.torture
def test_what_stock_does(checkpoint: Checkpoint, attack: str) -> None:
    spoil(checkpoint, attack)
    checkpoint.note_stock(attack)


def test_a_path_of_another_type_is_refused(checkpoint: Checkpoint) -> None:
    for path in (3, b"__0_0.distcp", checkpoint.path):
        checkpoint.place("weight").relative_path = path  # type: ignore[assignment]
        checkpoint.publish()
        checkpoint.assert_stopped("path: another type", Unsafe)
