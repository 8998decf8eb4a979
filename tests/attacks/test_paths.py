"""The metadata refers to data outside of the checkpoint's directory.

The attacker wants other files of the machine to be opened, or to be read as weights and published.
torch joins the path and opens it.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.attacks.support import Checkpoint
from tests.support import cause_of
from torch_ckpt import Unsafe
from torch_ckpt.stores import open_store

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


def modify(c: Checkpoint, attack: str) -> None:
    c.save_with_torch()
    (c.folder / "outside.distcp").write_bytes(c.data.read_bytes())
    c.location("weight").relative_path = PATHS[attack].replace("{folder}", str(c.folder))
    c.publish()


@pytest.mark.parametrize("attack", PATHS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    modify(checkpoint, attack)
    checkpoint.assert_stopped(attack, Unsafe, message="weight: the metadata refers to")


#: Names that a directory may have, and a store may not.
KEYS = ["a?b", "a#b", "a%2f..%2fb", "a::b", "s3://other/b", "a\nb", "a//b"]


@pytest.mark.parametrize("name", [*PATHS.values(), *KEYS])
def test_a_name_that_leads_elsewhere_is_rejected_beneath_a_url(
    checkpoint: Checkpoint, name: str
) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://{checkpoint.folder}/c"
    checkpoint.save_with_torch()
    checkpoint.location("weight").relative_path = name.replace("{folder}", str(checkpoint.folder))
    checkpoint.publish()
    store = open_store(url)
    for file in checkpoint.path.iterdir():
        data = file.read_bytes()
        store.put(file.name, iter([memoryview(data)]), len(data))
    with pytest.raises(Unsafe):
        torch_ckpt.verify(url)
    with pytest.raises(CheckpointException) as caught:
        torch_ckpt.load({"weight": torch.zeros(3, 4)}, url, no_dist=True, strict=False)
    assert isinstance(cause_of(caught.value), Unsafe)


@pytest.mark.parametrize("attack", PATHS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    modify(checkpoint, attack)
    checkpoint.record_stock(attack)


def test_a_path_of_another_type_is_rejected(checkpoint: Checkpoint) -> None:
    for path in (3, b"__0_0.distcp", checkpoint.path):
        checkpoint.location("weight").relative_path = path  # type: ignore[assignment]
        checkpoint.publish()
        checkpoint.assert_stopped("path: another type", Unsafe)
