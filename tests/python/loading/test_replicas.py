"""read_once: assignment of reads to ranks, and the parts in which data is sent."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support import bytes_of, random_tensor, save, stock_save
from torch_ckpt.checkpoint.reading import Reading
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.loading import shared_reads
from torch_ckpt.loading.load import LoadRun
from torch_ckpt.loading.shared_reads import _batches, _choose_owners, _digests
from torch_ckpt.options import ReadOptions
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.state.states import States

Plan = list[tuple[bytes | None, int]]


def test_reads_for_all_ranks_are_distributed_by_bytes() -> None:
    plan: Plan = [(bytes([i]), 100) for i in range(8)]
    owners = _choose_owners([plan] * 4)
    assert Counter(owner for owner, _ranks in owners.values()) == dict.fromkeys(range(4), 2)
    assert all(ranks == (0, 1, 2, 3) for _owner, ranks in owners.values())


def test_a_rank_with_many_reads_of_its_own_reads_little_for_others() -> None:
    shared: Plan = [(bytes([i]), 100) for i in range(8)]
    owners = _choose_owners([[*shared, (None, 550), (b"mine", 250)], shared])
    assert {owner for owner, _ranks in owners.values()} == {1}
    assert b"mine" not in owners


@pytest.mark.parametrize("seed", range(20))
def test_each_item_that_several_ranks_need_is_read_by_one_of_them(seed: int) -> None:
    choice = random.Random(seed)
    sizes = {bytes([i]): choice.randrange(1000) for i in range(50)}
    plans: list[Plan] = [
        [(d, size) for d, size in sizes.items() if choice.random() < 0.5] for _ in range(4)
    ]
    owners = _choose_owners(plans)
    wants = {d: tuple(r for r, plan in enumerate(plans) if d in dict(plan)) for d in sizes}
    shared = {digest: ranks for digest, ranks in wants.items() if len(ranks) > 1}
    assert {digest: ranks for digest, (_owner, ranks) in owners.items()} == shared
    assert all(owner in ranks for owner, ranks in owners.values())


def test_the_order_of_a_ranks_items_has_no_effect() -> None:
    plan: Plan = [(bytes([i]), 10 * i) for i in range(20)]
    assert _choose_owners([plan, plan]) == _choose_owners([plan, plan[::-1]])


@pytest.mark.parametrize("seed", range(20))
def test_batches_contain_all_bytes_in_order_within_the_limit(seed: int) -> None:
    choice = random.Random(seed)
    most = choice.randint(1, 50)
    tensors = [
        random_tensor((choice.choice([0, 1, 7, 50, 173]),), torch.uint8, i) for i in range(12)
    ]
    batches = list(_batches(tensors, most))
    assert all(0 < sum(part.numel() for part in batch) <= most for batch in batches)
    sent = b"".join(bytes_of(part) for batch in batches for part in batch)
    assert sent == b"".join(bytes_of(tensor) for tensor in tensors), f"seed {seed}"


def reading_of(path: Path, target: torch.Tensor, **options: bool) -> tuple[Source, Reading]:
    source = Source(path, ReadOptions(**options))
    return source, LoadRun(source, Exchange(), States({"t": target})).match().reading


@pytest.mark.parametrize(
    ("saver", "verify", "parts"),
    [(save, True, 10), (save, False, 10), (stock_save, True, 1), (stock_save, False, 10)],
)
def test_only_records_that_are_verified_in_parts_are_cut(
    tmp_path: Path, saver: object, verify: bool, parts: int
) -> None:
    tensor = random_tensor((100, 1000), torch.float32)
    assert callable(saver)
    saver({"t": tensor}, tmp_path)
    target = torch.zeros(100, 1000)
    source, reading = reading_of(tmp_path, target, verify=verify)
    reading.tensors.split(40_000, source.verifies_parts())
    assert len(reading.tensors) == parts
    source.read(reading)
    assert bytes_of(target) == bytes_of(tensor)


def test_a_tensor_with_at_most_one_row_is_not_cut(tmp_path: Path) -> None:
    for number, shape in enumerate([(), (1, 500), (0, 5)]):
        save({"t": random_tensor(shape, torch.float32)}, tmp_path / str(number))
        source, reading = reading_of(tmp_path / str(number), torch.zeros(shape))
        reading.tensors.split(1, source.verifies_parts())
        assert len(reading.tensors) <= 1


TARGETS = {
    "strided": torch.zeros(5, 8)[:, ::2],
    "transposed": torch.zeros(4, 5).t(),
    "negated": torch.zeros(5, 4)._neg_view(),
    "conjugated": torch.zeros(5, 4, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_targets_with_other_bytes_than_the_record_share_no_read(
    tmp_path: Path, target: torch.Tensor
) -> None:
    save({"t": torch.ones(5, 4)}, tmp_path)
    _source, reading = reading_of(tmp_path, target)
    assert [digest for digest, _size in _digests(b"one", list(reading.tensors))] == [None]


def test_items_for_different_memory_have_the_same_digest(tmp_path: Path) -> None:
    save({"t": torch.ones(5, 4)}, tmp_path)
    digests = []
    for target in (torch.zeros(5, 4), torch.ones(5, 4), torch.zeros(5, 4).double()):
        _source, reading = reading_of(tmp_path, target)
        digests += [digest for digest, _size in _digests(b"one", list(reading.tensors))]
    assert digests[0] == digests[1] != digests[2]
    assert None not in digests


def test_the_same_locations_in_two_checkpoints_have_different_digests(tmp_path: Path) -> None:
    """Saves checkpoints of the same size by independent processes."""
    digests = []
    for name in ("one", "two", "one"):
        if not (tmp_path / name).exists():
            save({"t": torch.ones(5, 4)}, tmp_path / name)
        source, reading = reading_of(tmp_path / name, torch.zeros(5, 4), read_once=True)
        digests += _digests(source.metadata_digest, list(reading.tensors))
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    ("config", "wanted", "expected"),
    [
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,xpu:xccl", "xpu:1", "xpu:1"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda:3"),
        ("cpu:mpi", "cuda:1", "cpu"),
        ("gloo", "cuda:1", "cpu"),
        ("nccl", "cpu", "cuda:3"),
    ],
)
def test_bytes_are_sent_from_devices_that_the_backend_supports(
    monkeypatch: pytest.MonkeyPatch, config: str, wanted: str, expected: str
) -> None:
    # torch's own table: no test machine has all of these backends and devices.
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda _group: config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert shared_reads._device_of(None, torch.device(wanted)) == torch.device(expected)
