"""torch_ckpt.multihost on one rank, with and without a process group, and its parts."""

from __future__ import annotations

import io
from collections import OrderedDict, namedtuple
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.rank_threads import tcp_store
from tests.support import DTYPES, random_tensor
from torch_ckpt import multihost
from torch_ckpt._base.formatting import ranks_text
from torch_ckpt.checkpoint.tensor_bytes import as_bytes
from torch_ckpt.multihost import RanksDisagree, layout, trees
from torch_ckpt.ranks import collective_call
from torch_ckpt.ranks.group import RankGroup

Pair = namedtuple("Pair", ["one", "two"])


def tree() -> dict[str, Any]:
    return {
        "t": torch.arange(6.0).view(2, 3),
        "n": [numpy.arange(3), numpy.float32(2.5), 7, None],
        "p": Pair(torch.tensor(True), "text"),
    }


def test_a_single_process_broadcasts_to_itself() -> None:
    before = tree()
    after = multihost.broadcast_one_to_all(before)
    assert torch.equal(after["t"], before["t"])
    assert after["t"].data_ptr() != before["t"].data_ptr()
    assert after["n"][0].tolist() == [0, 1, 2]
    assert after["n"][1:] == [numpy.float32(2.5), 7, None]
    assert after["p"] == Pair(torch.tensor(True), "text")
    with pytest.raises(RanksDisagree, match="exactly one rank, but it is True on no rank"):
        multihost.broadcast_one_to_all(before, is_source=False)


def test_a_single_process_gathers_from_itself() -> None:
    stacked, tiled = (multihost.process_allgather(tree(), tiled) for tiled in (False, True))
    assert stacked["t"].shape == (1, 2, 3)
    assert torch.equal(tiled["t"], tree()["t"])
    assert [part.tolist() for part in stacked["n"][:2]] == [[[0, 1, 2]], [2.5]]
    assert [part.tolist() for part in tiled["n"][:2]] == [[0, 1, 2], [2.5]]
    assert stacked["n"][2:] == tiled["n"][2:] == [[7], [None]]
    assert stacked["p"] == tiled["p"] == Pair(torch.tensor([True]), ["text"])


def test_a_single_process_agrees_with_itself() -> None:
    multihost.sync_global_devices("alone")
    multihost.assert_equal(tree(), "alone")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_any_dtype_are_sent_and_compared(dtype: torch.dtype) -> None:
    number = random_tensor((), dtype)
    multihost.assert_equal(number)
    for found in (multihost.broadcast_one_to_all(number), multihost.process_allgather(number)[0]):
        assert (found.dtype, found.shape) == (dtype, ())
        assert torch.equal(as_bytes(found), as_bytes(number))


@pytest.mark.parametrize(
    "array",
    [
        numpy.empty((0, 3)),
        numpy.array(["ab", "c"]),
        numpy.array([1, 2], ">i4"),
        numpy.zeros(2, [("a", "i4"), ("b", "f8")]),
        numpy.arange(4.0).reshape(2, 2)[::-1].T,
        numpy.frombuffer(b"read-only", numpy.uint8),
    ],
    ids=["empty", "texts", "big-endian", "fields", "view", "read-only"],
)
def test_arrays_of_any_kind_are_sent_and_compared(array: Any) -> None:
    multihost.assert_equal(array)
    tiled = multihost.process_allgather(array, tiled=True)
    for found in (multihost.broadcast_one_to_all(array), tiled):
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
        assert found.flags.writeable


def test_a_barrier_waits_for_the_work_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    # torch's function: the test machine may have no GPU.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append("yes"))
    multihost.sync_global_devices("alone")
    assert waited == ["yes"]


def test_leaves_are_named_by_their_path_from_the_root() -> None:
    taken = trees.Tree({"a": [1, (2, OrderedDict(c=3))], "d": Pair(4, []), 5: None})
    assert taken.names == ["a.0", "a.1.0", "a.1.1.c", "d.one", "5"]
    assert taken.leaves == [1, 2, 3, 4, None]
    assert taken.containers == {
        "": "dict",
        "a": "list",
        "a.1": "tuple",
        "a.1.1": "OrderedDict",
        "d": "Pair",
        "d.two": "list",
    }
    assert taken.with_leaves("vwxyz") == {
        "a": ["v", ("w", OrderedDict(c="x"))],
        "d": Pair("y", []),
        5: "z",
    }


def test_ambiguous_names_are_written_as_python_literals() -> None:
    assert trees.Tree({"a.b": 1, "a": {"b": 2}}).names == ["['a.b']", "['a'].b"]
    assert trees.Tree({1: 1, "1": 2}).names == ["[1]", "['1']"]
    assert trees.Tree(3).names == [""]


def test_ranks_are_written_in_runs() -> None:
    texts = [ranks_text(ranks) for ranks in ([3], [0, 1], [7, 0, 1, 2], [1, 3, 5])]
    assert texts == ["rank 3", "ranks 0-1", "ranks 0-2, 7", "ranks 1, 3, 5"]


def test_the_bytes_of_a_view_are_those_of_its_elements() -> None:
    for dtype in (torch.float32, torch.complex128, torch.bfloat16, torch.bool, torch.float8_e5m2):
        full = random_tensor((4, 6), dtype)
        rows = [as_bytes(column) for column in full.t().unbind()]
        assert torch.equal(as_bytes(full.t()), torch.cat(rows))
        assert as_bytes(full).data_ptr() == full.data_ptr()
    conjugated = torch.tensor([1 + 2j]).conj()
    assert torch.equal(as_bytes(conjugated), as_bytes(torch.tensor([1 - 2j])))
    assert as_bytes(torch.empty(0, 3)).shape == (0,)


def test_a_value_that_is_not_a_plain_tensor_is_sent_as_an_object() -> None:
    sparse = torch.eye(3).to_sparse()
    assert trees.kind(sparse) == trees.kind(torch.empty(2, device="meta")) == "an object"
    assert torch.equal(multihost.broadcast_one_to_all(sparse).to_dense(), torch.eye(3))
    [gathered] = multihost.process_allgather({"s": sparse})["s"]
    assert torch.equal(gathered.to_dense(), torch.eye(3))
    objects = numpy.array([{}, "x"], dtype=object)
    assert multihost.broadcast_one_to_all(objects).tolist() == [{}, "x"]
    # torch keeps a sparse tensor that one of its collectives has unpickled until the next load,
    # which would then warn.
    saved = io.BytesIO()
    torch.save(0, saved)
    torch.load(io.BytesIO(saved.getvalue()), weights_only=False)


@pytest.mark.usefixtures("default_group")
def test_a_lost_process_group_has_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("Connection closed by peer\nand more")

    # torch's function: a group of one cannot lose a rank.
    monkeypatch.setattr(dist, "broadcast", fail)
    with pytest.raises(ConnectionError, match=r"broadcast_one_to_all\(\): rank 0 lost the process"):
        multihost.broadcast_one_to_all(torch.ones(1))


@pytest.mark.usefixtures("default_group")
def test_calls_leave_nothing_in_the_store() -> None:
    store = dist.distributed_c10d._get_default_store()
    before = store.num_keys()
    for _turn in range(3):
        multihost.sync_global_devices("x")
        multihost.process_allgather(tree())
        multihost.assert_equal(tree())
        multihost.broadcast_one_to_all(tree())
    # gloo's own keys are created by its first collective.
    multihost.broadcast_one_to_all(tree())
    after = store.num_keys()
    multihost.broadcast_one_to_all(tree())
    assert store.num_keys() == after
    assert after - before < 10


def test_a_failing_store_has_its_own_error(capfd: pytest.CaptureFixture[str]) -> None:
    servers = [tcp_store()]
    dist.init_process_group("gloo", store=servers[0].clone(), rank=0, world_size=1)
    try:
        # The exchange of a group with one rank makes no requests.
        RankGroup.of(None).size = 2
        servers.clear()
        message = r"sync_global_devices\('x'\): rank 0 lost the connection to"
        with pytest.raises(ConnectionError, match=message):
            multihost.sync_global_devices("x", timeout=1)
    finally:
        dist.destroy_process_group()
    capfd.readouterr()  # of the store's own message


@pytest.fixture
def mesh(default_group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


@pytest.fixture
def made(mesh: DeviceMesh) -> Any:
    """Makes a tree with one global tensor."""
    return multihost.local_to_global({"a": torch.ones(2)}, mesh, [Shard(0)])


PLACEMENTS: list[tuple[Any, str]] = [
    ([Shard(0), Shard(0)], "a has 2 placements, but the mesh has 1 dimension"),
    ([Shard(1)], "a has 1 dimension, so it cannot be sharded"),
    (
        {"a": [Shard(0)]},
        "the tree and its placements do not have the same keys; only one of them has b",
    ),
    ({"a": [Shard(0)], "b": "x"}, "b has 'x' instead of placements"),
    ({"a": [Shard(0)], "b": {"c": []}}, r"b.c has \[\] instead of placements"),
]


def test_wrong_placements_are_reported_by_leaf(mesh: DeviceMesh) -> None:
    local = {"a": torch.ones(2), "b": {"c": torch.ones(3, 3)}}
    for placements, text in PLACEMENTS:
        with pytest.raises(ValueError, match=text):
            multihost.local_to_global(local, mesh, placements)


def test_a_global_tensor_is_unchanged_by_local_to_global(mesh: DeviceMesh, made: Any) -> None:
    again = multihost.local_to_global({**made, "b": torch.ones(2)}, mesh, [Replicate()])
    assert again["a"] is made["a"]
    assert again["b"].placements == (Replicate(),)


def test_a_local_tensor_is_unchanged_by_global_to_local(mesh: DeviceMesh, made: Any) -> None:
    local = {"b": torch.ones(2), "c": numpy.ones(2), "d": 1}
    back = multihost.global_to_local({**made, **local}, mesh, [Replicate()])
    assert type(back["a"]) is torch.Tensor
    assert all(back[name] is leaf for name, leaf in local.items())


def test_a_tensor_of_another_mesh_is_not_made_local(made: Any) -> None:
    assert isinstance(made["a"], DTensor)
    other = init_device_mesh("cpu", (1, 1))
    with pytest.raises(ValueError, match=r"a is on .*, not on"):
        multihost.global_to_local(made, other, [Shard(0), Shard(0)])


def test_a_local_tensor_can_be_a_partial_sum(mesh: DeviceMesh) -> None:
    made = multihost.local_to_global(torch.ones(2), mesh, [Partial()])
    assert made.placements == (Partial(),)


def test_shards_are_split_as_torch_splits_them() -> None:
    for length in range(9):
        for size in range(1, 5):
            parts = [part.shape[0] for part in torch.empty(length).chunk(size) if length]
            cut = [
                layout._local_shape((length,), [Shard(0)], (size,), (at,))[0] for at in range(size)
            ]
            assert cut == parts + [0] * (size - len(parts))
    mesh = (2, 3)
    places = [(row, column) for row in range(2) for column in range(3)]
    for by in ([Shard(0), Shard(0)], [Shard(1), Replicate()], [Replicate(), Shard(0)]):
        shapes = [layout._local_shape((7, 5), by, mesh, place) for place in places]
        assert layout._sum_shapes(shapes, by, places) == (7, 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_with_nccl_only_tensors_are_sent_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    broadcast = dist.broadcast

    def note(buffer: torch.Tensor, **options: Any) -> Any:
        sent.append(buffer.device.type)
        return broadcast(buffer, **options)

    # torch's function: its arguments show the device.
    monkeypatch.setattr(dist, "broadcast", note)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        state = {"cpu": torch.arange(3), "gpu": torch.arange(4.0, device="cuda"), "n": 7}
        multihost.assert_equal(state)
        for found in (
            multihost.broadcast_one_to_all(state),
            multihost.process_allgather(state, tiled=True),
        ):
            assert (found["cpu"].device.type, found["gpu"].device.type) == ("cpu", "cuda")
            assert found["cpu"].tolist() == [0, 1, 2]
            assert found["gpu"].tolist() == [0, 1, 2, 3]
        assert set(sent) == {"cuda"}
    finally:
        dist.destroy_process_group()


def test_failures_name_the_function_that_the_caller_used() -> None:
    def explained(causes: dict[int, BaseException], rank: int) -> BaseException:
        from torch.distributed.checkpoint.api import CheckpointException

        error = CheckpointException("step", {r: (cause, None) for r, cause in causes.items()})
        return collective_call.explained(error, "f()", rank, 5.0)

    mine = KeyError("x")
    assert explained({1: mine}, 1) is mine
    other = explained({1: mine}, 0)
    assert type(other) is RuntimeError
    assert str(other) == "f() failed on rank 1: KeyError: 'x'"
    late = explained({1: TimeoutError(), 2: TimeoutError()}, 1)
    assert type(late) is TimeoutError
    assert str(late).startswith("f(): ranks 1-2 did not arrive within 5 s")
    assert type(explained({0: ConnectionError()}, 0)) is ConnectionError
