"""Failed calls on one of two ranks, which fail the save on both."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.faults.saves import save_as_rank
from tests.interposed import Order, Server
from tests.sweeps import NEW, NEXT, OLD, SWEEPING, found_in, names_in, save_alone, unnamed_in

pytestmark = SWEEPING

HOW = ["torch_ckpt.save", "dcp.save", "async_save"]

#: The rank, the kind of call whose first one fails, and the errno.
FAULTS = [
    pytest.param(rank, kind, error, id=f"{kind} on rank {rank}")
    for rank, kind, error in (
        (0, "opendir", errno.EMFILE),
        (0, "fsync", errno.EIO),
        (0, "rename", errno.EDQUOT),
        (1, "opendir", errno.EMFILE),
        (1, "write", errno.ENOSPC),
        (1, "fsync", errno.EIO),
    )
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("rank", "kind", "error"), FAULTS)
def test_a_failed_call_on_one_rank_raises_on_both_and_publishes_nothing(
    servers: list[Server], tmp_path: Path, how: str, rank: int, kind: str, error: int
) -> None:
    path = tmp_path / "tree" / "checkpoint"
    path.parent.mkdir()
    save_alone(str(path), OLD, 4)
    before = names_in(path)
    failing = Order("fail", 1, kinds=(kind,), errors={kind: error})
    for number, server in enumerate(servers):
        order = failing if number == rank else Order()
        arguments = (str(path), NEW, 2, how, number, str(tmp_path / "store"))
        server.start(order, path.parent, save_as_rank, *arguments)
    runs = [server.finish() for server in servers]
    hit = runs[rank].hit
    assert hit is not None
    for run in runs:
        assert isinstance(run.error, dcp.CheckpointException), (run.error, hit)
        assert list(run.error.failures) == [rank]
        cause, _ = run.error.failures[rank]
        assert cause.errno == error
        assert str(path) in str(cause)
    assert found_in(path) == "old"
    if how != "dcp.save" or kind == "rename":
        # DCP does not report a failed write to the ranks whose writes succeeded.
        assert names_in(path) == before
    save_alone(str(path), NEXT, 4)
    assert found_in(path) == "next"
    assert not unnamed_in(path)
