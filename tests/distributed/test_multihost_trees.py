"""torch_ckpt.multihost on ranks: trees that are broadcast, gathered, compared and laid out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from tests.distributed import cases
from tests.distributed.background import replaced
from tests.distributed.cases import Launch, mesh_1d, tensor_of
from tests.distributed.launcher import on, on_ranks, takes_several
from tests.distributed.trees import PATIENCE, disagreement, others
from tests.support import DTYPES, assert_equal, random_tensor
from torch_ckpt import multihost
from torch_ckpt.multihost import moving

pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Unregistered:
    """Leaf: pytree does not know this class."""

    text: str


def several(seed: int, rows: int = 3) -> dict[str, Any]:
    """Makes tensors and arrays of every kind, with random bytes."""
    plain = {
        str(dtype): random_tensor((rows, 4), dtype, seed + n) for n, dtype in enumerate(DTYPES)
    }
    return {
        **plain,
        "odd": {
            "empty": torch.empty(0, 3),
            "number": random_tensor((), torch.float32, seed),
            "columns": random_tensor((4, rows), torch.bfloat16, seed).t(),
            "bool columns": random_tensor((4, rows), torch.bool, seed).t(),
            "expanded": random_tensor((1, 4), torch.float32, seed).expand(rows, 4),
            "conjugated": random_tensor((rows, 2), torch.complex64, seed).conj(),
            "parameter": torch.nn.Parameter(torch.full((rows,), float(seed))),
        },
        "arrays": [
            numpy.arange(rows * 4, dtype=numpy.float64).reshape(rows, 4)[:, ::2] + seed,
            numpy.full((rows, 1), seed, "datetime64[s]"),
            numpy.full((), seed, numpy.int16),
        ],
    }


def leaves_of(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree)


def assert_same(actual: Any, expected: Any) -> None:
    """Compares bit for bit, including containers."""
    assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
    named = pytree.tree_flatten_with_path(expected)[0]
    for found, (path, wanted) in zip(leaves_of(actual), named, strict=True):
        name = pytree.keystr(path)
        assert type(found) is type(wanted) or isinstance(wanted, torch.Tensor), name
        if isinstance(wanted, torch.Tensor):
            assert_equal(found.detach(), wanted.detach().resolve_conj().contiguous(), name)
        elif isinstance(wanted, numpy.ndarray):
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
            assert found.tobytes() == wanted.tobytes(), name
        else:
            assert found == wanted, name


# --- broadcast ------------------------------------------------------------------------------------


@on(1, 2)
def case_the_first_ranks_tree_is_on_all_ranks(launch: Launch) -> None:
    objects = [{"step": launch.rank, "name": f"run {launch.rank}", "all": {1, 2}}, None, 1.5]
    tree = {"tensors": several(launch.rank), "objects": (objects, numpy.float32(launch.rank))}
    found = multihost.broadcast_one_to_all(tree, timeout=PATIENCE)
    objects[0].update(step=0, name="run 0")
    assert_same(found, {"tensors": several(0), "objects": (objects, numpy.float32(0))})
    assert found["tensors"]["odd"]["parameter"].requires_grad


def case_any_rank_can_be_the_source_and_the_others_need_no_tree(launch: Launch) -> None:
    for source in range(launch.size):
        is_source = launch.rank == source
        for tree in (several(launch.rank), several(launch.rank) if is_source else None):
            found = multihost.broadcast_one_to_all(tree, is_source)
            assert_same(found, several(source))


def case_a_broadcast_result_shares_no_memory_with_the_tree(launch: Launch) -> None:
    tree = {"t": torch.ones(3), "a": numpy.ones(3), "l": Unregistered("x")}
    found = multihost.broadcast_one_to_all(tree)
    tree["t"].zero_()
    tree["a"][:] = 0
    assert found["t"].tolist() == found["a"].tolist() == [1, 1, 1]
    assert found["l"] == tree["l"]
    assert found["l"] is not tree["l"]


def case_trees_larger_than_a_batch_are_sent_in_pieces(launch: Launch) -> None:
    tree = [random_tensor((n,), torch.float32, launch.rank) for n in (1, 251, 999, 0, 4000)]
    expected = [random_tensor((n,), torch.float32, 0) for n in (1, 251, 999, 0, 4000)]
    with replaced(moving, "BATCH_BYTES", 1000):
        assert_same(multihost.broadcast_one_to_all(tree), expected)
    # A batch has at least 64 KiB.
    tree = [random_tensor((n + launch.rank,), torch.uint8, launch.rank) for n in (5, 150_000)]
    with replaced(moving, "BATCH_BYTES", 1):
        gathered = multihost.process_allgather([*tree], tiled=True)
    for n, got in zip((5, 150_000), gathered, strict=True):
        parts = [random_tensor((n + rank,), torch.uint8, rank) for rank in range(launch.size)]
        assert_equal(got, torch.cat(parts), str(n))


def case_replicated_dtensors_are_broadcast_and_sharded_ones_refused(launch: Launch) -> None:
    mesh = mesh_1d(launch)
    local = torch.full((3,), float(launch.rank))
    tree = {"r": DTensor.from_local(local, mesh, [Replicate()], run_check=False)}
    found = multihost.broadcast_one_to_all(tree)["r"]
    assert isinstance(found, DTensor)
    assert found.to_local().tolist() == [0, 0, 0]
    tree["s"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    with pytest.raises(ValueError, match="s is a sharded DTensor"):
        multihost.broadcast_one_to_all(tree)


# --- gather ---------------------------------------------------------------------------------------


@on(1, 2)
def case_gathered_tensors_are_stacked_by_rank(launch: Launch) -> None:
    found = multihost.process_allgather(several(launch.rank))
    every = [leaves_of(several(rank)) for rank in range(launch.size)]
    for got, parts in zip(leaves_of(found), zip(*every, strict=True), strict=True):
        for rank, part in enumerate(parts):
            assert_same(got[rank] if part.ndim else got[rank : rank + 1].reshape(()), part)
        assert not isinstance(got, torch.Tensor) or not got.requires_grad


def case_tiled_tensors_of_different_lengths_are_concatenated(launch: Launch) -> None:
    found = multihost.process_allgather(several(launch.rank, launch.rank), tiled=True)
    for got, *parts in zip(
        leaves_of(found), *(leaves_of(several(r, r)) for r in range(launch.size)), strict=True
    ):
        start = 0
        for part in parts:
            rows = part.shape[0] if part.ndim else 1
            assert_same(got[start : start + rows].reshape(part.shape), part)
            start += rows
        assert start == got.shape[0]


def case_other_leaves_are_gathered_as_lists_by_rank(launch: Launch) -> None:
    tree = {"step": launch.rank, "of": Unregistered(str(launch.rank)), "n": None}
    ranks = range(launch.size)
    assert multihost.process_allgather(tree) == {
        "step": list(ranks),
        "of": [Unregistered(str(rank)) for rank in ranks],
        "n": [None for _rank in ranks],
    }
    numbers = multihost.process_allgather(numpy.int16(launch.rank))
    assert (numbers.dtype, numbers.tolist()) == (numpy.int16, list(ranks))


@on(2, 4)
def case_sharded_tensors_are_gathered_as_full_tensors(launch: Launch) -> None:
    mesh = mesh_1d(launch)
    placements: dict[str, Placement] = {
        "rows": Shard(0),
        "columns": Shard(1),
        "replicated": Replicate(),
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128):
        full = random_tensor((5, 7), dtype, seed=1)
        tree = {}
        for name, by in placements.items():
            parts = [full]
            if isinstance(by, Shard):
                parts = list(full.view(torch.uint8).view(5, 7, -1).chunk(launch.size, by.dim))
                parts += [parts[0].narrow(by.dim, 0, 0)] * (launch.size - len(parts))
                parts = [part.contiguous().view(dtype).squeeze(-1) for part in parts]
            local = parts[launch.rank % len(parts)]
            tree[name] = DTensor.from_local(
                local, mesh, [by], run_check=False, shape=full.shape, stride=full.stride()
            )
        for tiled in (False, True):
            for name, found in multihost.process_allgather(tree, tiled).items():
                assert type(found) is torch.Tensor
                assert_equal(found, full, f"{name} of {dtype}")
    part = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    assert multihost.process_allgather(part).tolist() == [launch.size] * 2


@takes_several
@on(4)
def case_tensors_of_a_mesh_of_two_dimensions_are_gathered_as_full_tensors(launch: Launch) -> None:
    mesh = cases.mesh_2d(launch)
    for name, found in multihost.process_allgather(cases.dtensors_2d(mesh)).items():
        assert_equal(found, tensor_of(name, 9, 7), name)
    # Among half of the ranks.
    full = tensor_of(f"half {launch.rank // (launch.size // 2)}", 5, 3)
    assert_equal(multihost.process_allgather(distribute_tensor(full, mesh["b"], [Shard(0)])), full)


def case_a_gathered_replica_shares_no_memory_with_it(launch: Launch) -> None:
    replica = distribute_tensor(torch.ones(3), mesh_1d(launch), [Replicate()])
    found = multihost.process_allgather(replica)
    replica.to_local().zero_()
    assert found.tolist() == [1, 1, 1]


# --- equality -------------------------------------------------------------------------------------


def case_identical_trees_are_equal(launch: Launch) -> None:
    tree = several(1)
    tree["numbers"] = (1, -0.0, float("nan"), 1j, "text", b"", None, True, numpy.float32("nan"))
    tree["nan"] = torch.tensor([float("nan")])
    tree["sets"] = {"x", "y", "z"}
    # Strides, gradients and pickles of equal objects may differ.
    tensor, one = tensor_of("w", 4, 3), "".join(["a", "b"])
    tree["w"] = tensor.t().contiguous().t().requires_grad_() if launch.rank else tensor
    tree["o"] = Unregistered((one, one if launch.rank else "".join(["a", "b"])))  # type: ignore[arg-type]
    backwards = dict(reversed(list(tree.items())))
    multihost.assert_equal(backwards if launch.rank else tree, timeout=PATIENCE)


@takes_several
@on(2, 4)
def case_a_differing_leaf_is_named_with_its_ranks(launch: Launch) -> None:
    last = launch.rank == launch.size - 1
    for dtype in DTYPES:
        tree = {"a": {"b": [torch.zeros(1), random_tensor((3, 4), dtype)]}}
        if last:
            data = tree["a"]["b"][1].view(torch.uint8)
            data.view(-1)[-1] = data.view(-1)[-1] ^ 1
        text = disagreement(launch, lambda tree=tree: multihost.assert_equal(tree, "after loading"))
        assert text.startswith("assert_equal(): after loading: ranks differ in 1 leaf:"), text
        assert f"a.b.1 (a tensor of {str(dtype)[6:]}, shape (3, 4)) differs: " in text
        assert f"{others(launch)} ha" in text
        assert f" one value, rank {launch.size - 1} has another" in text


@takes_several
def case_differing_numbers_are_shown(launch: Launch) -> None:
    first = launch.rank == 0
    tree = {
        "step": 10 if first else 11,
        "t": torch.tensor(1.5 if first else 2.5),
        "z": 0.0 if first else -0.0,
        "type": 1 if first else True,
        "o": Unregistered("a" if first else "b"),
        "long": "x" * 100 + ("a" if first else "b"),
    }
    text = disagreement(launch, lambda: multihost.assert_equal(tree))
    assert text.startswith("assert_equal(): ranks differ in 6 leaves:")
    assert "step is int 10 on rank 0; int 11 on rank" in text
    assert "t is a tensor of float32, shape (), 1.5 on rank 0; a tensor" in text
    assert "z is float 0.0 on rank 0; float -0.0 on rank" in text
    assert "type is int 1 on rank 0; bool True on rank" in text
    assert re.search(r"o \(.*Unregistered\) differs: rank 0 has one value, rank", text)
    assert re.search(r"long \(str 'x+\.\.\.\) differs: rank 0 has one value, rank", text)


@takes_several
@on(4)
def case_shards_equal_only_their_replicas(launch: Launch) -> None:
    mesh = init_device_mesh("cpu", (2, launch.size // 2))
    place = mesh.get_coordinate()
    assert place is not None

    def sharded(value: float) -> DTensor:
        local = torch.full((2, 2), value)
        return DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)

    multihost.assert_equal({"w": sharded(place[1])})
    tree = {"w": sharded(place[1] + 10 * place[0] * (place[1] == launch.size // 2 - 1))}
    text = disagreement(launch, lambda: multihost.assert_equal(tree))
    ranks = [launch.size // 2 - 1, launch.size - 1]
    assert f"its shard [{launch.size // 2 - 1}]) differs: rank {ranks[0]} has one value, " in text
    assert f"rank {ranks[1]} has another" in text
    multihost.assert_equal(
        DTensor.from_local(torch.tensor(launch.rank), mesh_1d(launch), [Partial()])
    )


# --- local and global -----------------------------------------------------------------------------


@takes_several
def case_local_tensors_become_global_and_local_again(launch: Launch) -> None:
    mesh = init_device_mesh("cpu", (2, launch.size // 2))
    place = mesh.get_coordinate()
    assert place is not None
    placements = {
        "even": [Shard(0), Shard(1)],
        "uneven": [Shard(-1), Replicate()],
        "twice": [Shard(0), Shard(0)],
        "whole": None,
        "more": [Replicate(), Shard(0)],
    }
    full = {
        "even": tensor_of("even", 4, 8),
        "uneven": tensor_of("uneven", 3, 5),
        "twice": tensor_of("twice", 7, 2),
        "more": {"a": [tensor_of("a", 5)], "b": tensor_of("b", 1, 3)},
    }
    expected = {
        name: pytree.tree_map(lambda t, by=placements[name]: distribute_tensor(t, mesh, by), tree)
        for name, tree in full.items()
    }
    local = pytree.tree_map(lambda t: t.to_local().clone(), expected)
    local["whole"] = torch.ones(2)
    local["more"]["step"] = 5
    found = multihost.local_to_global(local, mesh, placements)
    back = multihost.global_to_local(found, mesh, placements)
    assert back["whole"] is found.pop("whole") is local["whole"]
    assert back["more"]["step"] == found["more"].pop("step") == 5
    for one, other in zip(leaves_of(found), leaves_of(expected), strict=True):
        assert isinstance(one, DTensor)
        assert one.placements == other.placements
        assert_equal(one.full_tensor(), other.full_tensor())
    for one, other in zip(leaves_of(back), leaves_of(local), strict=True):
        if isinstance(other, torch.Tensor):
            assert one.data_ptr() == other.data_ptr()
            assert_equal(one, other)


def case_one_list_of_placements_applies_to_all_leaves(launch: Launch) -> None:
    mesh = mesh_1d(launch)
    tree = [torch.full((2, 3), float(launch.rank)), numpy.full((1,), launch.rank)]
    found = multihost.local_to_global(tree, mesh, [Shard(0)])
    assert found[0].full_tensor()[:, 0].tolist() == [r for r in range(launch.size) for _ in "ab"]
    assert found[1].full_tensor().tolist() == list(range(launch.size))


def case_transposed_tensors_become_global_with_their_strides(launch: Launch) -> None:
    local = torch.arange(6.0).view(2, 3).t()
    found = multihost.local_to_global(local, mesh_1d(launch), [Shard(0)])
    assert found.stride() == (1, 3 * launch.size)
    assert found.to_local().data_ptr() == local.data_ptr()


def case_gradients_flow_back_to_the_local_tensor(launch: Launch) -> None:
    local = torch.ones(2, requires_grad=True)
    (multihost.local_to_global(local, mesh_1d(launch), [Shard(0)]) * 3).to_local().sum().backward()
    assert local.grad is not None
    assert local.grad.tolist() == [3, 3]


def case_other_placements_redistribute_a_tensor(launch: Launch) -> None:
    full = tensor_of("w", 4 * launch.size, 2)
    mesh = mesh_1d(launch)
    tree = {"w": distribute_tensor(full, mesh, [Shard(0)])}
    assert_equal(multihost.global_to_local(tree, mesh, [Replicate()])["w"], full)


# --- ranks that disagree --------------------------------------------------------------------------


@takes_several
@on(2, 4)
def case_trees_that_cannot_be_moved_are_named_with_their_ranks(launch: Launch) -> None:
    broadcast, gather = multihost.broadcast_one_to_all, multihost.process_allgather
    last = launch.size - 1

    def refused(function: Callable[..., Any], *args: Any, **options: Any) -> str:
        return disagreement(launch, lambda: function(*args, **options))

    text = refused(broadcast, 1, is_source=False)
    assert "is_source must be True on exactly one rank, but it is True on no rank" in text
    assert f"it is True on ranks 0-{last}" in refused(broadcast, 1, is_source=True)
    columns = 5 if launch.rank == last else 4
    tree = {"a": {"b": [torch.zeros(3, columns)]}, "same": torch.zeros(1)}
    text = refused(broadcast, tree)
    assert (
        f"a.b.0 is a tensor of float32, shape (3, 4) on {others(launch)}; "
        f"a tensor of float32, shape (3, 5) on rank {last}" in text
    )
    assert "same" not in text.split("\n", 1)[1]
    for function in (broadcast, gather):
        text = refused(function, {"a": 1, "b": 2} if launch.rank else {"a": 1})
        assert "b is missing on rank 0; an object on rank" in text
    dtype = torch.int64 if launch.rank else torch.int32
    text = refused(gather, {"x": torch.zeros(2, dtype=dtype)}, tiled=True)
    assert "x is a tensor of int32, shape (any) on rank 0; a tensor of int64" in text


@takes_several
def case_local_tensors_that_make_no_global_one_are_named(launch: Launch) -> None:
    mesh = mesh_1d(launch)

    def refused(tree: Any, placement: Placement) -> str:
        return disagreement(launch, lambda: multihost.local_to_global(tree, mesh, [placement]))

    tree = {"w": torch.ones(2), "v": torch.ones(2)}
    if launch.rank == 0:
        tree["w"] = DTensor.from_local(tree["w"], mesh, [Shard(0)], run_check=False)
    text = refused(tree, Shard(0))
    assert "w is missing on rank 0; a tensor of float32" in text
    assert "v is" not in text
    text = refused({"w": torch.zeros(5 if launch.rank else 1, 2)}, Shard(0))
    rows = 1 + 5 * (launch.size - 1)
    assert "w: the local tensor at mesh index 0 has shape (1, 2), but" in text
    assert f"a tensor with shape ({rows}, 2) and placements [Shard(dim=0)] requires" in text
    text = refused([torch.zeros(3 + launch.rank)], Replicate())
    assert "0: the local tensor at mesh index 1 has shape (4,), but" in text
    assert "a tensor with shape (3,) and placements [Replicate()] requires" in text


@takes_several
def case_differing_structures_are_named_and_many_differences_counted(launch: Launch) -> None:
    trees = [{"a": [1, 2], "e": {}}, {"a": (1, 2), "e": []}]
    text = disagreement(launch, lambda: multihost.assert_equal(trees[min(launch.rank, 1)]))
    assert "a (container) is list on rank 0; tuple on rank" in text
    assert "e (container) is dict on rank 0; list on rank" in text
    text = disagreement(launch, lambda: multihost.assert_equal([launch.rank] * 25))
    assert "ranks differ in 25 leaves" in text
    assert "9 is int 0 on rank 0" in text
    assert "10 is" not in text
    assert text.endswith("and 15 more")


@takes_several
def case_a_failure_on_one_rank_is_named_on_the_others(launch: Launch) -> None:
    is_last, last = launch.rank == launch.size - 1, launch.size - 1
    with pytest.raises(Exception if is_last else RuntimeError, match="pickle") as caught:
        multihost.process_allgather({"x": (lambda: 0) if is_last else 1})
    text = f"process_allgather(tiled=False) failed on rank {last}"
    assert is_last or text in str(caught.value)


test_on_ranks = on_ranks(globals(), (1, 2, 4))
