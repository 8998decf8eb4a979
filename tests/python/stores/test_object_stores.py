"""The contract of object stores, over each library and server."""

from __future__ import annotations

import errno
import gc
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.object_server import ObjectServer
from tests.python.stores.conftest import KINDS, memory_store, obstore_store
from torch_ckpt.stores import (
    Changed,
    Limits,
    ObjectStore,
    Version,
    object_store,
    part_bytes,
    parts_in_flight,
)

MIB = 1 << 20


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, open_kind: Callable[[str], ObjectStore]) -> ObjectStore:
    return open_kind(kind)


def pieces(data: bytes, size: int) -> Iterator[memoryview]:
    view = memoryview(data)
    return (view[begin : begin + size] for begin in range(0, len(view), size))


def put(store: ObjectStore, name: str, data: bytes) -> Version:
    return store.put(name, pieces(data, 5 * MIB), len(data))


def read_range(store: ObjectStore, name: str, begin: int, end: int, version: Any = None) -> bytes:
    return bytes(store.read_range(name, begin, end - begin, version))


@pytest.mark.parametrize("size", [0, 1, 1000, 16 * MIB, 16 * MIB + 1, 37 * MIB])
def test_an_object_reads_as_it_was_put(store: ObjectStore, size: int) -> None:
    data = random.Random(size).randbytes(size)
    put(store, "step/data", data)
    entry = store.head("step/data")
    assert (entry.name, entry.bytes) == ("step/data", size)
    for begin, end in {(0, size), (size // 3, size // 2), (max(size - 7, 0), size)}:
        assert read_range(store, "step/data", begin, end, entry.version) == data[begin:end]


def test_put_replaces_an_object(store: ObjectStore) -> None:
    put(store, "a", b"old one")
    put(store, "a", b"new")
    assert store.read("a", 10)[0] == b"new"


def test_an_object_that_was_replaced_is_named_and_not_mixed(store: ObjectStore) -> None:
    put(store, "a", b"old one")
    version = store.head("a").version
    put(store, "a", b"the new one")
    with pytest.raises(Changed, match="replaced") as caught:
        read_range(store, "a", 0, 3, version)
    assert caught.value.errno == errno.ESTALE
    assert caught.value.filename == store.url_of("a")


def test_a_read_beyond_the_end_fails(store: ObjectStore) -> None:
    put(store, "a", b"0123456789")
    for begin, end in ((5, 11), (10, 11), (20, 30)):
        with pytest.raises(OSError, match="read failed") as caught:
            read_range(store, "a", begin, end)
        assert caught.value.filename == store.url_of("a")


def test_a_read_has_a_limit(store: ObjectStore) -> None:
    put(store, "a", b"01234")
    assert store.read("a", 5)[0] == b"01234"
    with pytest.raises(OSError, match="has 5 bytes, more than 4") as caught:
        store.read("a", 4)
    assert caught.value.errno == errno.EFBIG


def test_a_missing_object_is_a_file_not_found(store: ObjectStore) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.head("none"),
        lambda: store.read("none", 9),
        lambda: read_range(store, "none", 0, 5),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert caught.value.filename == store.url_of("none")
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None


def test_a_listing_has_all_objects_beneath_a_directory(store: ObjectStore) -> None:
    names = ["a/b/one", "a/two", "a b/[x]*", "top", "ab"]
    for name in names:
        put(store, name, name.encode())
    assert {entry.name: entry.bytes for entry in store.list()} == {n: len(n) for n in names}
    assert sorted(entry.name for entry in store.list("a")) == ["a/b/one", "a/two"]
    assert list(store.list("none")) == []


def test_delete_ignores_missing_objects(store: ObjectStore) -> None:
    for name in ("a/1", "a/2", "a/[x]*", "a/x"):
        put(store, name, b"1")
    store.delete(["a/1", "a/none", "a/[x]*"])
    assert sorted(entry.name for entry in store.list("a")) == ["a/2", "a/x"]
    store.delete(["a/2"])
    store.delete([])
    assert [entry.name for entry in store.list("a")] == ["a/x"]


def ignores_conditions(kind: str) -> bool:
    return kind.endswith("juicefs")


def test_put_if_absent_creates_an_object_once(store: ObjectStore, kind: str) -> None:
    if ignores_conditions(kind):
        pytest.skip("the server ignores conditions")
    store.put_if_absent("a", b"first")
    with pytest.raises(FileExistsError) as caught:
        store.put_if_absent("a", b"other")
    assert caught.value.filename == store.url_of("a")
    assert store.read("a", 10)[0] == b"first"


def test_swap_replaces_only_the_expected_version(store: ObjectStore, kind: str) -> None:
    if ignores_conditions(kind):
        pytest.skip("the server ignores conditions")
    put(store, "a", b"first")
    old = store.head("a").version
    if kind.startswith("fsspec") and kind != "fsspec-memory":
        with pytest.raises(OSError, match="cannot compare") as refused:
            store.swap("a", b"second", old)
        assert refused.value.errno == errno.EOPNOTSUPP
        return
    new = store.swap("a", b"second", old)
    with pytest.raises(Changed):
        store.swap("a", b"third", old)
    assert store.read("a", 10)[0] == b"second"
    assert pickle.loads(pickle.dumps(new)).agrees(store.head("a").version)
    with pytest.raises(Changed):
        store.swap("none", b"third", old)


@pytest.mark.parametrize(("given", "word"), [(9, "fewer"), (11, "more")])
def test_a_wrong_number_of_bytes_stores_nothing(store: ObjectStore, given: int, word: str) -> None:
    for scale in (1, 2 * MIB):
        with pytest.raises(ValueError, match=f"have {word} than {10 * scale} bytes"):
            store.put("a", pieces(bytes(given * scale), MIB), 10 * scale)
        assert list(store.list()) == []


def test_an_error_of_the_parts_is_raised_as_it_is(store: ObjectStore) -> None:
    error = KeyError("mine")

    def parts() -> Iterator[memoryview]:
        yield from pieces(bytes(20 * MIB), 5 * MIB)
        raise error

    with pytest.raises(KeyError) as caught:
        store.put("a", parts(), 30 * MIB)
    assert caught.value is error
    assert list(store.list()) == []


def test_a_name_outside_of_the_root_is_refused(store: ObjectStore) -> None:
    calls: list[Callable[[str], object]] = [
        lambda name: put(store, name, b""),
        lambda name: store.put_if_absent(name, b""),
        lambda name: store.swap(name, b"", Version("e")),
        lambda name: store.read(name, 1),
        lambda name: read_range(store, name, 0, 1),
        store.head,
        lambda name: list(store.list(name)),
        lambda name: store.delete([name]),
    ]
    for call in calls:
        for name in ("../x", "/x", "a//b", "s3://b/x", "a?b", "a#b", "a\nb"):
            with pytest.raises(ValueError, match="not allowed"):
                call(name)


def test_errors_can_be_sent_to_other_ranks() -> None:
    error = pickle.loads(pickle.dumps(Changed(errno.ESTALE, "the object was replaced", "s3://b/a")))
    assert isinstance(error, Changed)
    assert (error.errno, error.filename) == (errno.ESTALE, "s3://b/a")


def test_a_store_cannot_be_pickled(store: ObjectStore) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(store)


# --- parts and views ------------------------------------------------------------------------------


def test_parts_fit_the_limits_of_s3() -> None:
    for size in (0, 1, 16 * MIB, 10**9, 150 * 2**30, 2**40, 5 * 2**40):
        part, in_flight = part_bytes(size), parts_in_flight(size)
        assert part >= 16 * MIB
        assert -(-size // part) <= 9000
        assert part < 5 * 2**30
        assert 1 <= in_flight <= 4
        assert in_flight == 1 or in_flight * part <= 128 * MIB
    assert part_bytes(100 * 2**30) == 16 * MIB


class Chunks:
    """Chunks of memory that count how many views of them are exported."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.exported: set[int] = set()
        self.most = 0

    def views(self, count: int) -> Iterator[memoryview]:
        import ctypes

        for number in range(count):
            memory = (ctypes.c_ubyte * self.size)()
            memory[0] = number
            self.exported.add(number)
            self.most = max(self.most, len(self.exported))
            weakref.finalize(memory, self.exported.discard, number)
            view = memoryview(memory).cast("B")
            del memory
            yield view
            del view


@pytest.mark.parametrize("kind", ["obstore-s3", "fsspec-s3", "fsspec-file"], indirect=True)
def test_views_are_released_when_they_are_no_longer_read(store: ObjectStore) -> None:
    chunks, count = Chunks(8 * MIB), 12
    store.put("a", chunks.views(count), count * chunks.size)
    gc.collect()
    assert chunks.exported == set()
    # Two chunks a part, of the parts in flight and of the next one, and one that was just yielded.
    assert chunks.most <= 2 * 5 + 1
    assert read_range(store, "a", 11 * chunks.size, 11 * chunks.size + 1) == b"\x0b"


def test_memory_is_exported_while_it_is_sent(server: ObjectServer) -> None:
    store = obstore_store("s3://bucket/run", server.options)
    chunks = [bytearray(16 * MIB) for _ in range(2)]
    exported = []

    def parts() -> Iterator[memoryview]:
        for chunk in chunks:
            yield memoryview(chunk)
            try:
                chunk.append(0)  # Impossible while its buffer is exported.
            except BufferError:
                exported.append(chunk)

    store.put("a", parts(), 32 * MIB)
    assert exported
    for chunk in exported:
        chunk.append(0)


def test_an_upload_continues_with_chunks_for_one_part(server: ObjectServer) -> None:
    import ctypes
    import queue

    store = obstore_store("s3://bucket/run", server.options, Limits(progress=5, retry=5))
    free: queue.Queue[int] = queue.Queue()
    memory = [bytearray(8 * MIB) for _ in range(2)]
    for number in range(2):
        free.put(number)

    def parts() -> Iterator[memoryview]:
        for number in range(8):
            chunk = free.get(timeout=20)
            memory[chunk][:] = bytes([number]) * (8 * MIB)
            exporter = (ctypes.c_ubyte * (8 * MIB)).from_buffer(memory[chunk])
            weakref.finalize(exporter, free.put, chunk)
            view = memoryview(exporter).cast("B")
            del exporter
            yield view
            del view

    store.put("a", parts(), 64 * MIB)
    stored = server.objects["run/a"].data
    assert [stored[number * 8 * MIB] for number in range(8)] == list(range(8))
    assert server.kinds().count("part") == 4


def test_a_large_view_is_split_into_parts(server: ObjectServer) -> None:
    sizes: list[int] = []
    server.fault = lambda request: sizes.append(int(request.headers["content-length"]))
    data = random.Random(1).randbytes(40 * MIB)
    store = obstore_store("s3://bucket/run", server.options)
    store.put("a", iter([memoryview(data)[: 3 * MIB], memoryview(data)[3 * MIB :]]), len(data))
    assert server.objects["run/a"].data == data
    assert sorted(sizes)[-3:] == [8 * MIB, 16 * MIB, 16 * MIB]
    words = memoryview(data[: 32 * MIB]).cast("q")
    store.put("a", [words, memoryview(b"")], 32 * MIB)
    assert server.objects["run/a"].data == data[: 32 * MIB]


def test_a_small_object_is_one_request(server: ObjectServer) -> None:
    put(obstore_store("s3://bucket/run", server.options), "a", bytes(16 * MIB))
    assert server.kinds() == ["put"]


# --- listings -------------------------------------------------------------------------------------


def test_a_listing_has_several_pages(server: ObjectServer) -> None:
    server.page = 3
    store = obstore_store("s3://bucket/run", server.options)
    for number in range(10):
        put(store, f"n{number}", b"")
    server.log.clear()
    assert len(list(store.list())) == 10
    assert server.kinds() == ["list"] * 4


def test_a_listing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "MOST_ENTRIES", 5)
    store = memory_store()
    for number in range(6):
        put(store, f"n{number}", b"")
    with pytest.raises(OSError, match="more than 5 objects") as caught:
        list(store.list())
    assert caught.value.errno == errno.EOVERFLOW


def test_hostile_names_are_left_out_of_a_listing(server: ObjectServer) -> None:
    store = obstore_store("s3://bucket/run", server.options)
    put(store, "good", b"")
    for name in ("run/a?b", "run/a#b", "run/a%2e"):
        server.objects[name] = server.objects["run/good"]
    assert [entry.name for entry in store.list()] == ["good"]
    # obstore refuses a listing with such a name.
    server.objects["run/a\x1bb"] = server.objects["run/good"]
    with pytest.raises(OSError, match=r"invalid path.*a\\x1bb"):
        list(store.list())


def test_a_refused_bulk_delete_is_repeated_singly(server: ObjectServer) -> None:
    from tests.object_server import Fault, s3_fault

    store = obstore_store("s3://bucket/run", server.options)
    missing_key = "<DeleteResult><Error><Code>MissingContentMD5</Code></Error></DeleteResult>"
    for answer in (
        s3_fault(400, "MissingContentMD5"),
        s3_fault(501, "NotImplemented"),
        Fault("status", 200, missing_key),
    ):
        store = obstore_store("s3://bucket/run", server.options)
        for name in ("a", "b", "c"):
            put(store, name, b"1")
        server.fault = lambda request, a=answer: a if request.kind == "bulk delete" else None
        server.log.clear()
        store.delete(["a", "b", "none"])
        assert server.kinds()[-3:] == ["delete"] * 3
        assert [entry.name for entry in store.list()] == ["c"]
        server.log.clear()
        store.delete(["c"])
        assert server.kinds() == ["delete"]


# --- HTTP -----------------------------------------------------------------------------------------


def test_a_store_over_http_is_read_only(server: ObjectServer) -> None:
    put(obstore_store("s3://bucket/a b", server.options), "x/1", b"0123456789")
    store = obstore_store(f"{server.url}/bucket/a b", {"headers": {"Authorization": "Bearer t"}})
    entry = store.head("x/1")
    assert entry.bytes == 10
    assert read_range(store, "x/1", 3, 7, entry.version) == b"3456"
    assert store.read("x/1", 10)[0] == b"0123456789"
    assert server.log[-1].headers["authorization"] == "Bearer t"
    writes: list[Callable[[], object]] = [
        lambda: put(store, "x/2", b"1"),
        lambda: store.put_if_absent("x/2", b"1"),
        lambda: store.delete(["x/1"]),
    ]
    for write in writes:
        with pytest.raises(OSError, match="read-only") as caught:
            write()
        assert caught.value.errno == errno.EROFS
    with pytest.raises(OSError, match="cannot be listed") as refused:
        list(store.list())
    assert refused.value.errno == errno.EOPNOTSUPP
    assert list(server.objects) == ["a b/x/1"]
