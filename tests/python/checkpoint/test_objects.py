"""Objects in checkpoints: safe ones are loaded, others are refused, and planners are called."""

from __future__ import annotations

import argparse
import datetime
import enum
import io
import pathlib
import pickle
import random
import subprocess
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

import torch_ckpt
from tests.attacks.support import with_entry
from tests.support import cause_of, emptied, load, save
from torch_ckpt import CheckpointError, Corrupt, Unsafe
from torch_ckpt.checkpoint import safe_types
from torch_ckpt.checkpoint.objects import decode


def record_of(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def again(value: Any) -> Any:
    """Saves and loads an object."""
    return decode(record_of(value), "name", "file")


UTC = datetime.timezone.utc
VALUES: list[Any] = [
    *(None, True, 0, -5, 2**31, -(2**70), 2**3000, 1.5, float("inf"), 1 + 2j),
    *("", "é\ud800", b"", b"\xff\x00abc", bytearray(), bytearray(b"\xff\x00")),
    *((), (1, (2, (3,))), (1, 2, 3, 4), [], [1, [2]], {"a": {1: (2,)}}),
    *(set(), {1, (2, 3)}, frozenset({1, frozenset({2})}), slice(1, None, 2), range(1, 10, 3)),
    *(argparse.Namespace(lr=1e-3, layers=[1, 2]), types.SimpleNamespace(a=1)),
    *(pathlib.Path("/a/b"), pathlib.PurePosixPath("a")),
    *(datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.datetime(2026, 1, 2, tzinfo=UTC)),
    *(datetime.date(2026, 1, 2), datetime.time(3, 4, tzinfo=UTC), datetime.timedelta(1, 2, 3)),
    datetime.timezone(datetime.timedelta(hours=2), "here"),
    *(OrderedDict(b=1, a=2), defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2})),
    *(Counter("abca"), deque([1, 2, 3]), deque([1, 2], maxlen=2), random.Random(0).getstate()),
    *(torch.Size([2, 3]), torch.float32, torch.bfloat16, torch.strided, torch.per_tensor_affine),
    *(torch.device("cpu"), torch.device("cuda", 1), [Shard(1), Replicate(), Partial("sum")]),
    *(numpy.float64(1.5), numpy.int8(-3), numpy.bool_(True), numpy.float32(2)),
    *(numpy.str_("ab"), numpy.str_(""), numpy.bytes_(b"")),
    [Path("/data") / ("long" * 60) / str(number) for number in range(1000)],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__} {str(v)[:40]!r}")
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_safe_objects_are_loaded_unchanged(value: Any, protocol: int) -> None:
    found = decode(record_of(value, pickle_protocol=protocol), "name", "file")
    assert type(found) is type(value)
    assert found == value


ARRAYS = [
    *(numpy.arange(6).reshape(2, 3), numpy.asfortranarray(numpy.ones((3, 2), numpy.float16))),
    *(numpy.array(["a", "bcd"]), numpy.array([b"ab", b"c"]), numpy.arange(3, dtype=">i4")),
    *(numpy.zeros((0, 3)), numpy.array(5), numpy.array([True, False]), numpy.array([1 + 2j])),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype} {a.shape}")
def test_arrays_are_loaded_unchanged(array: Any) -> None:
    found = again(array)
    # numpy itself stores the other byte order and converts it when it loads.
    assert found.dtype == pickle.loads(pickle.dumps(array, 2)).dtype
    assert found.flags.f_contiguous == array.flags.f_contiguous
    assert numpy.array_equal(found, array)


def test_objects_with_a_state_continue_from_it() -> None:
    restored = numpy.random.RandomState()
    restored.set_state(again(numpy.random.RandomState(3).get_state()))
    assert restored.randint(10**9) == numpy.random.RandomState(3).randint(10**9)
    buffer = io.BytesIO(b"hello")
    buffer.read(2)
    assert again(buffer).read() == b"llo"
    assert again(deque([1], maxlen=7)).maxlen == 7
    assert again(defaultdict(set)).default_factory is set


TENSORS = [
    *(torch.arange(6.0).reshape(2, 3).t(), torch.arange(6.0)[2:4], torch.tensor(3)),
    *(torch.empty(0, 3), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.uint16)),
    *(torch.ones(2, dtype=torch.complex64), torch.nn.Parameter(torch.ones(2))),
    *(torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype} {t.layout} {tuple(t.shape)}")
def test_tensors_in_objects_are_loaded_and_stay_shared(tensor: torch.Tensor) -> None:
    one, other = again((tensor, tensor))
    assert one is other
    assert type(one) is type(tensor)
    assert one.layout is tensor.layout
    assert one.stride() == tensor.stride() if tensor.layout is torch.strided else True
    assert torch.equal(one.detach().to_dense(), tensor.detach().to_dense())


def test_a_tensor_keeps_its_shared_storage_and_attributes() -> None:
    tensor = torch.arange(6.0)
    tensor.tag = "mine"  # type: ignore[attr-defined]
    whole, one, other = again((tensor, tensor[:3], tensor[3:]))
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert whole.tag == "mine"


def test_quantized_tensors_in_objects_are_loaded() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    assert torch.equal(again((tensor,))[0].dequantize(), tensor.dequantize())


class Own:
    """Class of a user."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and self.value == other.value


class Pair(NamedTuple):
    one: int
    other: int


class OwnDict(dict[str, int]):
    """Subclass with attributes."""


@pytest.mark.parametrize(
    ("value", "declared"),
    [
        (Own(3), Own),
        (Own(3), (Own, f"{__name__}.Own")),
        (Pair(1, 2), Pair),
        (OwnDict(a=1), OwnDict),
    ],
    ids=["class", "class under a name", "named tuple", "dict"],
)
def test_a_users_class_is_refused_until_it_is_declared_safe(value: Any, declared: Any) -> None:
    with pytest.raises(Unsafe, match=type(value).__name__) as error:
        again(value)
    assert "torch.serialization.add_safe_globals" in str(error.value)
    with torch.serialization.safe_globals([declared]):
        before = torch.serialization.get_safe_globals()
        found, _allow_listed = again((value, deque([1])))
        assert torch.serialization.get_safe_globals() == before
    assert type(found) is type(value)
    assert found == value


class OwnTensor(torch.Tensor):
    """Tensor subclass of a user."""


def test_a_users_tensor_subclass_is_refused_until_it_is_declared_safe() -> None:
    tensor = torch.arange(3.0).as_subclass(OwnTensor)
    tensor.tag = "mine"  # type: ignore[attr-defined]
    with pytest.raises(Unsafe, match="OwnTensor"):
        again((tensor,))
    with torch.serialization.safe_globals([OwnTensor]):
        (found,) = again((tensor,))
    assert type(found) is OwnTensor
    assert found.tolist() == [0, 1, 2]
    assert found.tag == "mine"


class AsTensor:
    """Object that claims to be a tensor of some type."""

    def __init__(self, kind: type, state: Any) -> None:
        self.kind = kind
        self.state = state

    def __reduce__(self) -> Any:
        arguments = torch.ones(1).storage(), 0, (1,), (1,), False, OrderedDict()
        tensor = torch._utils._rebuild_tensor_v2
        return torch._tensor._rebuild_from_type_v2, (tensor, self.kind, arguments, self.state)


def test_only_tensors_of_safe_classes_are_rebuilt_by_their_class() -> None:
    with torch.serialization.safe_globals([Own]), pytest.raises(Unsafe, match=r"constructs .*Own"):
        again(AsTensor(Own, {}))
    # A plain tensor has attributes, but no slots that a state may set.
    assert again(AsTensor(torch.Tensor, {"tag": 1})).tag == 1
    with pytest.raises(Corrupt, match="is not a dict with str keys"):
        again(AsTensor(torch.Tensor, (None, {"requires_grad": True})))


class StartsGroup:
    def __reduce__(self) -> Any:
        return DeviceMesh, ("cpu", [0])


def test_classes_that_torch_declares_safe_start_no_process_group() -> None:
    assert DeviceMesh in torch.serialization.get_safe_globals()
    # Only if a process group can be started.
    with mock.patch.object(torch.distributed, "init_process_group") as started:
        with pytest.raises(Unsafe, match=r"calls torch\.distributed\.device_mesh\.DeviceMesh"):
            again(StartsGroup())
        assert not started.called


class Color(enum.Enum):
    """Enum of a user."""

    RED = (1,)


class ChangesRed:
    def __reduce__(self) -> Any:
        return Color, ((1,),), {"evil": True}


def test_a_member_of_a_safe_enum_is_found_and_not_changed() -> None:
    with torch.serialization.safe_globals([Color]):
        assert again([Color.RED, Color.RED]) == [Color.RED, Color.RED]
        with pytest.raises(Unsafe, match="sets the state of a Color"):
            again(ChangesRed())
    assert not hasattr(Color.RED, "evil")


def test_nested_containers_are_loaded_unchanged() -> None:
    inner = defaultdict(deque, {i: deque([i], maxlen=3) for i in range(3000)})
    value = deque([inner, inner, deque([defaultdict(None, {"a": deque([deque()])})])])
    assert again(value) == value
    itself: deque[Any] = deque()
    itself.append(itself)
    found = again(itself)
    assert found[0] is found


def test_hooks_that_are_filled_later_do_not_belong_to_the_tensor() -> None:
    class Made:
        def __reduce__(self) -> Any:
            storage = torch.ones(1).storage()
            return torch._utils._rebuild_tensor_v2, (storage, 0, (1,), (1,), True, hooks)

    hooks: OrderedDict[str, Any] = OrderedDict()
    hooks["made while it is empty"] = Made()
    hooks["called by backward"] = list
    tensor = again(hooks)["made while it is empty"]
    (tensor * 2).sum().backward()
    assert tensor.grad.item() == 2


def test_a_tensor_of_an_absent_device_has_its_own_error() -> None:
    record = record_of((torch.ones(3),)).replace(b"X\x03\x00\x00\x00cpu", b"X\x03\x00\x00\x00hpu")
    with pytest.raises(
        CheckpointError, match="the object in file contains a tensor on hpu"
    ) as error:
        decode(record, "name", "file")
    assert type(error.value) is CheckpointError


def test_objects_are_decoded_by_several_threads_at_the_same_time() -> None:
    value = {"a": [deque([i]) for i in range(300)]}
    record = record_of(value)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: decode(record, "name", "file"), range(4)))
    assert found == [value] * 4


def test_a_reason_quotes_little_text_and_no_control_characters() -> None:
    def refusal(name: str) -> str:
        program = b"\x80\x02c" + name.encode() + b"\nb\n."
        with pytest.raises(Unsafe) as error:
            decode(with_entry(record_of(7), "data.pkl", program), "name", "file")
        return str(error.value)

    assert r"names \x1b[2J.b, which is not" in refusal("\x1b[2J")
    assert len(refusal("a" * 10**6)) < 1000


def test_an_object_array_is_refused_by_name() -> None:
    with pytest.raises(Unsafe, match=r"name: the object in file constructs a dtype"):
        again(numpy.array([1, {}], dtype=object))


def test_a_truncated_or_changed_record_only_fails_or_gives_another_value() -> None:
    seed = 5
    generator = random.Random(seed)
    record = record_of({"a": [1, 2.0, deque([3]), argparse.Namespace(b="c")], "d": torch.ones(2)})
    for size in range(0, len(record), 13):
        with pytest.raises(Corrupt):
            decode(record[:size], "name", "file")
    begin = record.index(b"\x80\x02")
    end = record.index(b"PK", begin)
    for _ in range(500):
        changed = bytearray(record)
        changed[generator.randrange(begin, end)] = generator.randrange(256)
        try:
            decode(bytes(changed), "name", "file")
        except CheckpointError:
            pass
        except BaseException as error:
            pytest.fail(f"seed {seed}: {error!r}")


# --- in a load -----------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", [torch_ckpt.FileSystemWriter, dcp.FileSystemWriter])
@pytest.mark.parametrize("flatten", [True, False])
def test_objects_are_stored_where_torchs_planner_stores_them(
    tmp_path: Path, writer: Any, flatten: bool
) -> None:
    nested = {"a": {"b": deque([1]), "weight": torch.ones(2)}, "c": "text"}
    state = nested if flatten else {"b": deque([1]), "c": "text"}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=flatten)
    dcp.save(state, storage_writer=writer(tmp_path), planner=planner, no_dist=True)
    loaded = emptied(state)
    # Flattening in either direction makes a new dict.
    load(loaded, tmp_path, planner=dcp.DefaultLoadPlanner(flatten, flatten))
    assert (loaded["a"]["b"] if flatten else loaded["b"]) == deque([1])
    assert loaded["c"] == "text"


def test_a_planner_with_its_own_load_bytes_receives_the_bytes(tmp_path: Path) -> None:
    got = []

    class Noting(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            got.append(value.getvalue())
            super().load_bytes(read_item, value)

    save({"step": 7}, tmp_path)
    state = {"step": 0}
    load(state, tmp_path, planner=Noting())
    assert got == [record_of(7)]
    assert state == {"step": 7}


class Raw(dcp.DefaultLoadPlanner):
    """Planner for bytes that are not a pickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


class RawSaving(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return io.BytesIO(object)


def test_bytes_of_a_planner_need_a_trusted_writer(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    dcp.save({"step": b"raw"}, storage_writer=writer, planner=RawSaving(), no_dist=True)
    with pytest.raises(dcp.CheckpointException) as error:
        load({"step": 0}, tmp_path, planner=Raw())
    assert isinstance(cause_of(error.value), Corrupt)
    assert "allow_pickle=True" in str(cause_of(error.value))
    state: dict[str, Any] = {"step": 0}
    load(state, tmp_path, planner=Raw(), allow_pickle=True)
    assert state == {"step": b"raw"}


@pytest.mark.parametrize("ours", [False, True])
def test_a_trusted_writers_objects_are_unpickled_as_by_torch(tmp_path: Path, ours: bool) -> None:
    save({"own": Own(3)}, tmp_path)
    state: dict[str, Any] = {"own": None}
    if ours:
        torch_ckpt.load(
            state, tmp_path, options=torch_ckpt.ReadOptions(allow_pickle=True), no_dist=True
        )
    else:
        load(state, tmp_path, allow_pickle=True)
    assert state == {"own": Own(3)}


def test_importing_and_loading_does_not_import_numpy() -> None:
    # It may not be installed.
    program = """
import sys
sys.modules["numpy"] = None
import torch_ckpt.checkpoint.objects, torch, io
stream = io.BytesIO()
torch.save({"a": 1}, stream)
assert torch_ckpt.checkpoint.objects.decode(stream.getvalue(), "name", "file") == {"a": 1}
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_values_of_numpy_without_numpy_are_not_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(numpy.arange(3))
    safe_types._numpy_names.cache_clear()
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(CheckpointError, match="numpy is not installed; install it") as error:
        decode(record, "name", "file")
    assert type(error.value) is CheckpointError
