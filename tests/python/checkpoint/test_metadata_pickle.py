"""Programs that a metadata pickle may contain, and the seal behind it."""

from __future__ import annotations

import importlib
import io
import pickle
import random
import resource
import struct
import subprocess
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import EnumMeta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

import torch_ckpt
from tests.cpp.stock_metadata import rich, small, with_looked_up_members
from tests.forked import in_fork
from tests.metadata import read_metadata
from tests.support import DTYPES, save, stock_save, zeros
from torch_ckpt import Corrupt, Unsafe, _core
from torch_ckpt.checkpoint.metadata import _AllowListUnpickler, decode_metadata, encode_metadata

ROLES = _core.allowed_globals()
SEAL_BYTES = 16
PROTOCOLS = [2, 3, 4, 5]


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Makes a process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def distributed_tensor() -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    return distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (1,)), [Shard(0)])


def old_sharded_tensor() -> Any:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
    return sharded_tensor.zeros(spec, 4, 3)


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "tensors": lambda: {"a": torch.zeros(3), "b": torch.zeros(2, 1, 4, dtype=torch.int64)},
    "all dtypes": lambda: {str(dtype): zeros((4,), dtype) for dtype in DTYPES},
    "objects": lambda: {"step": 3, "note": "x" * 300, "nested": {"list": [1, {"deep": 2.5}]}},
    "nothing": dict,
    "1500 tensors": lambda: {f"layer.{i}": torch.zeros(i % 3) for i in range(1500)},
    "64 dimensions": lambda: {"a": torch.zeros((1,) * 64)},
    "DTensor": lambda: {"weight": distributed_tensor()},
    "ShardedTensor": lambda: {"weight": old_sharded_tensor()},
}


def unpickled(data: bytes) -> Any:
    """Returns what a program makes, valid or not."""
    _core.walk_pickle(data)
    return _AllowListUnpickler(io.BytesIO(data)).load()


def accepts(data: bytes, metadata: Metadata) -> None:
    assert _core.walk_pickle(data) <= len(data)
    assert decode_metadata(data, "here") == metadata


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("saver", [save, stock_save])
@pytest.mark.filterwarnings("ignore:.*ShardedTensor")
def test_metadata_pickled_again_by_any_pickler_is_read(
    group: None, tmp_path: Path, name: str, protocol: int, saver: Callable[..., Metadata]
) -> None:
    saver(STATES[name](), tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    accepts(data, pickle.loads(data))
    # Protocol 2 has no bytes, which checksum tables are, and makes them through a codec.
    if saver is stock_save or protocol > 2:
        accepts(pickle.dumps(read_metadata(tmp_path), protocol), pickle.loads(data))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_metadata_with_stored_plans_and_older_sharded_tensors_is_read(protocol: int) -> None:
    metadata = rich()
    assert vars(unpickled(pickle.dumps(metadata, protocol))) == vars(metadata)


def test_metadata_of_a_python_that_looks_up_members_by_getattr_is_read() -> None:
    data = with_looked_up_members(rich(), 4)
    assert b"getattr" in data
    assert vars(unpickled(data)) == vars(rich())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -(2**31), 2**100, 0.5, "text " * 100, "\ud800 and \N{SNOWMAN}"),
        *((1, ("two", (3.0, None))), [[], [1], list(range(2500))]),
        *({"a": 1, 2: {3: [4]}, ("b", 5): ()}, {i: str(i) for i in range(2500)}),
        *(OrderedDict(a=1, b=OrderedDict()), Path("/a/b c/d"), torch.strided, torch.bfloat16),
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:12]!a}",
)
def test_values_that_a_planner_may_store_are_read(protocol: int, value: Any) -> None:
    metadata = Metadata({}, planner_data=value, storage_data={})
    again = decode_metadata(pickle.dumps(metadata, protocol), "here")
    assert again.planner_data == value
    assert type(again.planner_data) is type(value)


def named_objects() -> Iterator[tuple[str, str, Any]]:
    """Yields each allowed name that this torch and this Python have, its role and its object."""
    for name, role in ROLES.items():
        module, _, attribute = name.partition(" ")
        is_newer = module == "pathlib._local"  # of Python 3.13
        is_newer |= name == "torch bcomplex32" and not hasattr(torch, attribute)
        if not is_newer:
            yield name, role, getattr(importlib.import_module(module), attribute)


def test_every_name_has_the_role_that_its_object_needs() -> None:
    for name, role, value in named_objects():
        if role == "value":
            assert isinstance(value, torch.dtype), name
        elif role == "enumeration":
            assert isinstance(value, EnumMeta), name
        elif role == "member":
            assert value is getattr
        elif role in ("function", "mapping"):
            assert callable(value), name
        else:
            assert isinstance(value, type), name
            assert hasattr(value, "__setstate__") == (role == "tuple_class"), name
            assert hasattr(value, "__slots__") == (role == "slots_class"), name


_DECODE_UNKNOWN_DTYPE = """
import sys
from torch_ckpt import _core
print(*[name for name, role in _core.allowed_globals().items() if role == "value"], sep="\\n")
import torch
torch.float99 = torch.float32
from torch_ckpt.checkpoint import index
print(len(index.decode_index(sys.stdin.buffer.read(), "a test")))
"""


def test_dtypes_are_known_before_torchs_import_and_new_ones_after_it(tmp_path: Path) -> None:
    save({"a": torch.zeros(2)}, tmp_path)
    pickled = (tmp_path / ".metadata").read_bytes()[:-SEAL_BYTES]
    done = subprocess.run(
        [sys.executable, "-c", _DECODE_UNKNOWN_DTYPE],
        input=pickled.replace(b"float32", b"float99"),
        stdout=subprocess.PIPE,
        check=True,
    )
    *known, count = done.stdout.decode().splitlines()
    assert {name for name, role in ROLES.items() if role == "value"} <= set(known)
    assert count == "1"


# --- programs that mean harm ---------------------------------------------------------------------


def name_of(value: Any) -> bytes:
    return f"c{value.__module__}\n{value.__name__}\n".encode()


PROTO = b"\x80\x04"
GETATTR = b"cbuiltins\ngetattr\n"


def test_a_program_that_metadata_never_contains_is_refused_with_its_place() -> None:
    # tests/cpp/metadata_pickle_test.cpp has a program for each reason of a refusal.
    with pytest.raises(
        Corrupt,
        match=r"^here is damaged or not a checkpoint's metadata: pickle at byte 3: opcode 105",
    ):
        decode_metadata(PROTO + b"(ios\nsystem\n.", "here")


@pytest.mark.parametrize("name", ["__class__", "mro", "nothing"])
def test_an_attribute_of_an_enum_that_is_not_a_member_is_unsafe(name: str) -> None:
    text = b"X" + struct.pack("<I", len(name)) + name.encode()
    program = PROTO + GETATTR + name_of(_MEM_FORMAT_ENCODING) + text + b"\x86R."
    with pytest.raises(Unsafe, match=f"looks up the attribute '{name}'"):
        unpickled(program)


def test_our_metadata_uses_no_getattr(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_getattr(member: Any, protocol: int) -> Any:
        return getattr, (type(member), member.name)

    # As Python 3.11.0 to 3.11.3 pickles members.
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_getattr)
    assert b"getattr" in pickle.dumps(small(), 4)
    assert b"getattr" not in encode_metadata(small())


def shared_by_the_process() -> dict[str, dict[str, Any]]:
    """Returns the attributes of all that metadata may name, and of the members of its enums."""
    return {
        f"{name} {part}": dict(getattr(part, "__dict__", {}))
        for name, _role, value in named_objects()
        for part in [value, *(value if isinstance(value, EnumMeta) else [])]
    }


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_accepted_damaged_program_leaves_the_process_unchanged(protocol: int) -> None:
    seed = 7
    rng = random.Random(seed)
    pickles = [pickle.dumps(rich(), protocol), pickle.dumps(small(), protocol)]
    unpickled(pickles[0])  # fills what torch fills lazily
    before = shared_by_the_process()
    passed = 0
    for number in range(3000):
        data = bytearray(rng.choice(pickles))
        for _ in range(rng.randint(1, 2)):
            place = rng.randrange(len(data))
            # The bytes of a program are mostly opcodes and small numbers.
            data[place] = rng.choice(pickles[0]) if rng.random() < 0.5 else rng.randrange(256)
        try:
            _core.walk_pickle(bytes(data))
        except (Corrupt, Unsafe):
            continue
        passed += 1
        try:
            _AllowListUnpickler(io.BytesIO(data)).load()
        except (MemoryError, RecursionError, SystemError) as error:
            pytest.fail(f"seed {seed}, number {number}: {error!r}")
        except Exception:  # invalid text, a size of -1: refused by the called constructor
            continue
        assert before == shared_by_the_process(), f"seed {seed}, number {number}"
    assert passed > 100


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (b"cos\nsystem\n.", "os.system"),
        (b"ctorch\nSize.__new__\n.", "torch.Size.__new__"),
        (b"\x8c\7\xff\xff\xff\xff\xff\xff\xff\x8c\1\n\x93.", r"\?\?\?\?\?\?\?.\?"),
    ],
    ids=["a module's", "a member's", "no text"],
)
def test_a_name_that_is_not_allowed_is_unsafe_and_quoted(program: bytes, name: str) -> None:
    message = (
        f"^here: the metadata names {name}, which is not on the allow-list for metadata; "
        r"pass ReadOptions\(allow_pickle=True\) .*only if you trust the writer$"
    )
    with pytest.raises(Unsafe, match=message):
        decode_metadata(PROTO + program, "here")


def test_a_trusted_pickle_is_not_walked() -> None:
    metadata = Metadata({}, planner_data={frozenset({1}), b"bytes"}, storage_data={})
    data = pickle.dumps(metadata)
    with pytest.raises(Corrupt):
        decode_metadata(data, "here")
    assert decode_metadata(data, "here", allow_pickle=True) == metadata


def test_lack_of_memory_is_not_reported_as_damage() -> None:
    # More than earlier tests may have left free in the heap.
    large = 256 << 20
    data = pickle.dumps(Metadata({}, planner_data={"t": ("x" * large,)}, storage_data={}))

    def work() -> None:
        decode_metadata(data, "here")
        here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (here + large // 4,) * 2)
        with pytest.raises(MemoryError):
            decode_metadata(data, "here")

    in_fork(work)


# --- the seal ------------------------------------------------------------------------------------


@pytest.fixture
def sealed() -> bytes:
    # Small, so that all its bits can be flipped one by one.
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.zeros(2), "s": 1}, is_coordinator=True)
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    return encode_metadata(metadata)


both_trusts = pytest.mark.parametrize("allow_pickle", [False, True], ids=["", "allow_pickle"])


def test_the_seal_has_the_documented_format(sealed: bytes) -> None:
    body, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
    assert seal == b"TCM1" + struct.pack("<IQ", zlib.crc32(body), len(body))
    assert body.endswith(b".")
    assert pickle.loads(body) == pickle.loads(sealed)


def test_stock_torch_ignores_the_seal(tmp_path: Path) -> None:
    save({"weight": torch.arange(12.0).view(3, 4), "step": 3}, tmp_path)
    assert (tmp_path / ".metadata").read_bytes()[-SEAL_BYTES:].startswith(b"TCM1")
    read = dcp.FileSystemReader(tmp_path).read_metadata()
    assert read.storage_data == read_metadata(tmp_path).storage_data


@both_trusts
def test_every_flipped_bit_is_detected(sealed: bytes, allow_pickle: bool) -> None:
    decode_metadata(sealed, "here", allow_pickle=allow_pickle)
    for place in range(len(sealed)):
        for bit in range(8):
            damaged = bytearray(sealed)
            damaged[place] ^= 1 << bit
            with pytest.raises((Corrupt, Unsafe)):
                decode_metadata(bytes(damaged), "here", allow_pickle=allow_pickle)


@both_trusts
def test_a_file_truncated_anywhere_but_at_the_end_of_the_pickle_is_refused(
    sealed: bytes, allow_pickle: bool
) -> None:
    # That file equals one of stock torch.
    complete = decode_metadata(sealed, "here", allow_pickle=allow_pickle)
    for size in range(len(sealed)):
        if size == len(sealed) - SEAL_BYTES:
            assert decode_metadata(sealed[:size], "here", allow_pickle=allow_pickle) == complete
            continue
        with pytest.raises(Corrupt):
            decode_metadata(sealed[:size], "here", allow_pickle=allow_pickle)


@both_trusts
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data + b"\0",
        lambda data: data + data[-SEAL_BYTES:],
        lambda data: data[:-SEAL_BYTES] + b"\0" + data[-SEAL_BYTES:],
        lambda data: data[:-SEAL_BYTES] + b"more",
        lambda data: data + data,
    ],
    ids=["a byte more", "two seals", "a byte before the seal", "no seal", "twice"],
)
def test_bytes_that_belong_to_neither_pickle_nor_seal_are_refused(
    sealed: bytes, damage: Callable[[bytes], bytes], allow_pickle: bool
) -> None:
    with pytest.raises(Corrupt):
        decode_metadata(damage(sealed), "here", allow_pickle=allow_pickle)


def test_damaged_metadata_fails_the_load_by_name(tmp_path: Path) -> None:
    save({"weight": torch.zeros(3)}, tmp_path)
    file = tmp_path / ".metadata"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        Corrupt, match=r"\.metadata is damaged .*: the contents do not match the checksum"
    ):
        torch_ckpt.FileSystemReader(tmp_path).read_metadata()
