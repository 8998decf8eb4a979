"""The results of one rank's write, as ranks send them to the coordinator."""

import pickle

import pytest

from torch_ckpt import _core


def written(*names: str) -> _core.WrittenFiles:
    return _core.WrittenFiles(
        [(name, b"table of " + name.encode(), [(n, 0, 100, n)]) for n, name in enumerate(names)]
    )


def test_results_are_the_same_after_they_are_pickled() -> None:
    files = pickle.loads(pickle.dumps(written("a", "b")))
    assert files.names == ["a", "b"]
    assert files.tables == {"a": b"table of a", "b": b"table of b"}
    assert files.locations() == [("a", 0, 100, 0), ("b", 0, 100, 1)]
    assert files.locations(1) == [("b", 0, 100, 1)]
    assert len(files) == 2


def test_locations_of_items_with_wrong_numbers_are_refused() -> None:
    files = _core.WrittenFiles([("a", b"", [(1, 0, 100, 0)])])
    with pytest.raises(IndexError, match="exactly one result per item"):
        files.locations()
