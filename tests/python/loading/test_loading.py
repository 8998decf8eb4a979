"""Options of a load: a part of the state, states that do not fit, a user's planner."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

import torch_ckpt
from tests.loads import LOADERS, MIB, load, mismatch, refusal, save
from tests.metadata import read_metadata
from tests.support import StateDict, assert_equal, emptied, stock_save
from torch_ckpt import CheckpointError, Corrupt, LoadMismatch

# --- what fits and what does not -----------------------------------------------------------------

STORED: StateDict = {
    "model": {"weight": torch.ones(3, 2), "bias": torch.ones(2), "list": [torch.ones(1), 5]},
    "step": 3,
    "extra": torch.ones(1),
}


def misfit() -> StateDict:
    """Makes a state that differs from STORED in every way."""
    return {
        "model": {
            "weight": torch.full((3, 3), 7.0),
            "bias": "no tensor",
            "list": [torch.full((1,), 7.0, dtype=torch.float16), 7],
        },
        "absent": torch.full((2,), 7.0),
        "step": 7,
    }


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored")
    save(STORED, path)
    return path


@pytest.fixture(params=[False, True], ids=["in place", "free_before_read"])
def free(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def assert_names_all_differences(report: torch_ckpt.LoadReport) -> None:
    assert not report.fits
    assert report.missing == ["absent"]
    assert report.unexpected == ["extra"]
    assert report.shapes == [("model.weight", torch.Size([3, 2]), torch.Size([3, 3]))]
    assert report.kinds == [("model.bias", "a tensor", "a str")]
    assert report.dtypes == [("model.list.0", torch.float32, torch.float16)]
    assert report.narrowed == ["model.list.0"]
    assert sorted(report.loaded) == ["model.list.0", "model.list.1", "step"]


def test_all_differences_are_in_one_message_and_nothing_is_changed(
    stored: Path, free: bool
) -> None:
    state = misfit()
    cause = mismatch(lambda: load(state, stored, free_before_read=free))
    assert_names_all_differences(cause.report)
    for part in (
        "1 missing from the checkpoint:\n  absent",
        "1 with a different shape:\n  model.weight: stored [3, 2], wanted [3, 3]",
        "1 of a different kind:\n  model.bias: stored a tensor, wanted a str",
        "1 only in the checkpoint:\n  extra",
        "1 with a different dtype:\n  model.list.0: stored torch.float32, wanted torch.float16",
    ):
        assert part in str(cause)
    assert_equal(state, misfit())


def test_a_stored_object_does_not_replace_a_tensor(stored: Path, free: bool) -> None:
    state = {"step": torch.full((2,), 7.0)}
    cause = mismatch(lambda: load(state, stored, free_before_read=free))
    assert cause.report.kinds == [("step", "an object", "a Tensor")]
    assert cause.report.loaded == []
    assert state["step"].tolist() == [7, 7]
    counter = {"step": torch.tensor(7)}
    load(counter, stored, free_before_read=free)
    assert counter["step"] == STORED["step"]


def test_preflight_raises_the_same_mismatch_and_changes_nothing(stored: Path) -> None:
    state = misfit()
    assert_names_all_differences(torch_ckpt.preflight(state, stored))
    assert_equal(state, misfit())


def test_a_mismatch_is_pickled_with_its_report(stored: Path) -> None:
    cause = mismatch(lambda: load(misfit(), stored))
    back = pickle.loads(pickle.dumps(cause))
    assert type(back) is LoadMismatch
    assert back.report == cause.report
    assert str(back) == str(cause)


@pytest.mark.filterwarnings("ignore:loading converts")
def test_a_partial_load_loads_what_fits_and_keeps_the_rest(stored: Path, free: bool) -> None:
    state, expected = misfit(), misfit()
    report = load(state, stored, strict=False, free_before_read=free)
    assert_names_all_differences(report)
    expected["model"]["list"] = [torch.ones(1, dtype=torch.float16), 5]
    expected["step"] = 3
    assert_equal(state, expected)


def test_a_full_load_reports_all_names_as_loaded(stored: Path) -> None:
    state = emptied(STORED)
    report = load(state, stored)
    assert report.fits
    assert sorted(report.loaded) == sorted(torch_ckpt.preflight(state, stored).loaded)
    assert report.unexpected == []
    assert_equal(state, STORED)


def test_an_empty_state_reports_all_names_of_a_checkpoint_as_unexpected(
    stored: Path, tmp_path: Path, free: bool
) -> None:
    report = load({}, stored, free_before_read=free)
    assert report.fits
    assert report.loaded == []
    assert sorted(report.unexpected) == sorted(torch_ckpt.preflight({}, stored).unexpected)
    assert len(report.unexpected) == 6
    cause = refusal(lambda: load({}, tmp_path, free_before_read=free))
    assert isinstance(cause, FileNotFoundError)


def test_a_missing_file_of_an_object_is_named_with_the_object(tmp_path: Path) -> None:
    options = torch_ckpt.WriteOptions(single_file_per_rank=False)
    torch_ckpt.save({"weight": torch.ones(2), "step": 3}, tmp_path, options=options)
    storage_data = read_metadata(tmp_path).storage_data
    [file] = {info.relative_path for index, info in storage_data.items() if index.fqn == "step"}
    (tmp_path / file).unlink()
    cause = refusal(lambda: torch_ckpt.load({"weight": torch.zeros(2), "step": 0}, tmp_path))
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == str(tmp_path / file)
    assert "step" in str(cause)


def test_a_message_about_many_names_counts_the_others(stored: Path) -> None:
    cause = mismatch(lambda: load({f"absent {i:02}": 0 for i in range(30)}, stored))
    assert "30 missing from the checkpoint:" in str(cause)
    assert "absent 07" in str(cause)
    assert "absent 08" not in str(cause)
    assert "and 22 more" in str(cause)
    assert len(cause.report.missing) == 30


@pytest.mark.parametrize(
    ("names", "loaded"),
    [
        (["model.*"], {"model.weight", "model.bias", "model.list.0", "model.list.1"}),
        (["step"], {"step"}),
        (["*.weight", "s*"], {"model.weight", "step"}),
        (["extra"], {"extra"}),
        (lambda name: name.endswith("bias"), {"model.bias"}),
        (lambda name: False, set()),
    ],
)
def test_only_selected_names_are_loaded(
    stored: Path, names: Any, loaded: set[str], free: bool
) -> None:
    state = emptied(STORED)
    # The patterns may be an iterator.
    selected = names if callable(names) else iter(names)
    report = load(state, stored, names=selected, free_before_read=free)
    assert set(report.loaded) == loaded
    assert torch.equal(state["model"]["weight"], torch.ones(3, 2)) == ("model.weight" in loaded)
    assert torch.equal(state["model"]["bias"], torch.ones(2)) == ("model.bias" in loaded)
    assert (state["step"] == 3) == ("step" in loaded)
    assert torch.equal(state["extra"], torch.ones(1)) == ("extra" in loaded)


def test_names_that_are_not_selected_need_not_fit(stored: Path) -> None:
    state = misfit()
    load(state, stored, names=["step"])
    assert state["step"] == 3


def test_patterns_without_a_match_are_named(stored: Path, free: bool) -> None:
    state = emptied(STORED)
    names = ["step", "modle.*", "b*"]
    cause = refusal(lambda: load(state, stored, names=names, free_before_read=free))
    assert type(cause) is ValueError
    assert str(cause) == "no name in the state dict matches 'modle.*', 'b*'"
    assert state["step"] is None


@pytest.mark.parametrize("ask", [load, torch_ckpt.preflight, torch_ckpt.estimate_read_memory])
def test_a_plain_string_of_names_is_refused(stored: Path, ask: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a list of patterns, got the string 'model\.\*'"):
        ask(emptied(STORED), stored, names="model.*")


@pytest.mark.parametrize(
    "options", [{"strict": False}, {"names": ["a"]}, {"free_before_read": True}], ids=str
)
def test_a_planner_excludes_our_options(stored: Path, options: Any) -> None:
    with pytest.raises(ValueError, match="do not work with a planner"):
        load({}, stored, planner=dcp.DefaultLoadPlanner(), **options)


def test_a_load_by_a_planner_returns_the_checkpoint(stored: Path) -> None:
    state = emptied(STORED)
    checkpoint = load(state, stored, planner=dcp.DefaultLoadPlanner())
    assert checkpoint.path == str(stored)
    assert_equal(state, STORED)


class Holder:
    """Stateful that counts the calls of its methods."""

    def __init__(self, value: float) -> None:
        self.weight = torch.full((4,), value)
        self.nested = {"count": int(value)}
        self.loads = 0

    def state_dict(self) -> StateDict:
        return {"weight": self.weight, "nested": self.nested}

    def load_state_dict(self, state: StateDict) -> None:
        self.weight, self.nested = state["weight"], state["nested"]
        self.loads += 1


@pytest.mark.parametrize(
    ("names", "loads", "weight"), [(None, (1, 1), 2), (["b._objects"], (0, 1), 7)], ids=str
)
def test_stateful_values_with_a_selected_name_are_loaded_once(
    tmp_path: Path, free: bool, names: Any, loads: tuple[int, int], weight: int
) -> None:
    save({"a": Holder(1), "b": Holder(2)}, tmp_path)
    a, b = Holder(7), Holder(7)
    state = {"a": a, "b": b}
    load(state, tmp_path, names=names, free_before_read=free)
    assert (state["a"], state["b"]) == (a, b)
    assert (a.loads, b.loads) == loads
    assert b.weight.tolist() == [weight] * 4
    assert b.nested == {"count": 2}


def test_stateful_values_are_not_loaded_if_they_do_not_fit(tmp_path: Path) -> None:
    save({"a": Holder(1)}, tmp_path)
    a = Holder(7)
    mismatch(lambda: load({"a": a, "b": torch.zeros(1)}, tmp_path))
    assert a.loads == 0
    assert a.weight.tolist() == [7] * 4


@pytest.fixture
def of_torch_2_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, StateDict]:
    """Makes a checkpoint in which a dict without tensors is one item, as torch 2.3 saved it."""
    state = {
        "options": {"lr": 0.1, "betas": (0.9, 0.95)},
        "model": {"weight": torch.ones(3, 2), "note": "text"},
    }
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    stock_save(state, tmp_path)
    monkeypatch.setattr(_version, "_derived_version", None)
    return tmp_path, state


def test_checkpoints_with_the_names_of_torch_2_3_are_loaded(
    of_torch_2_3: tuple[Path, StateDict], free: bool
) -> None:
    path, state = of_torch_2_3
    report = torch_ckpt.preflight(emptied(state), path)
    assert sorted(report.loaded) == ["model.note", "model.weight", "options"]
    loaded = emptied(state)
    assert load(loaded, path, free_before_read=free).fits
    assert_equal(loaded, state)


def test_a_load_with_the_names_of_torch_2_3_does_not_affect_other_threads(
    of_torch_2_3: tuple[Path, StateDict],
) -> None:
    class Watching(dict[str, Any]):
        def items(self) -> Any:
            versions.add(_version._derived_version)
            return super().items()

    versions: set[str | None] = set()
    path, state = of_torch_2_3
    loaded = {key: Watching(value) for key, value in emptied(state).items()}
    load(loaded, path)
    assert_equal(dict(loaded["options"]), state["options"])
    assert versions == {None}


# --- planners of the caller's own ----------------------------------------------------------------


class Noting(dcp.DefaultLoadPlanner):
    """Planner that records the calls of its hooks, and receives tensors in other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.planned: list[str] = []
        self.threads: set[int] = set()

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.planned = [item.dest_index.fqn for item in new_plan.items]
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self._note("resolve", read_item)
        return torch.empty(read_item.lengths, dtype=torch.float16)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._note("commit", read_item)
        super().resolve_tensor(read_item).copy_(tensor)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self._note("bytes", read_item)
        super().load_bytes(read_item, value)

    def _note(self, hook: str, item: ReadItem) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append((hook, item.dest_index.fqn))


@pytest.mark.filterwarnings("ignore:loading converts")
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("limit", [MIB + 5000, 1 << 30], ids=["little memory", "much memory"])
def test_hooks_are_called_in_pairs_in_order_on_the_calling_thread(
    tmp_path: Path, loader: Any, limit: int
) -> None:
    state: StateDict = {f"t{i}": torch.full((i * 100, 7), float(i)) for i in range(5)}
    state |= {"large": torch.full((300, 700), 9.0), "step": 3}
    save(state, tmp_path)
    planner = Noting()
    grown = {name: torch.full((600, 701), 7.0) for name in state if name != "step"}
    loaded: StateDict = grown | {"step": 0}
    loader(loaded, tmp_path, planner=planner, zero_fill=True, max_inflight_bytes=limit)
    assert planner.threads == {threading.get_ident()}
    pairs = {name: [("resolve", name), ("commit", name)] for name in state}
    pairs["step"] = [("bytes", "step")]
    assert planner.calls == [call for name in planner.planned for call in pairs[name]]
    assert set(planner.planned) == {name for name in state if name != "t0"}
    assert loaded["step"] == 3
    for name, tensor in grown.items():
        expected = torch.zeros(600, 701)
        expected[: state[name].size(0), : state[name].size(1)] = state[name]
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("loader", LOADERS)
def test_a_planners_conversion_warns_once(tmp_path: Path, loader: Any) -> None:
    save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path)
    with pytest.warns(UserWarning, match="loading converts") as caught:
        loader({"a": torch.zeros(3), "b": torch.zeros(3)}, tmp_path, planner=Noting())
    (message,) = [str(w.message) for w in caught if "loading converts" in str(w.message)]
    for name in "ab":
        assert f"{name} (torch.float32 to torch.float16)" in message


class WithoutStateDict(dcp.LoadPlanner):
    """Planner with only the methods that torch requires."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, *args: Any) -> None:
        self.inner = dcp.DefaultLoadPlanner()
        self.inner.set_up_planner(state_dict, metadata, True)

    def create_local_plan(self) -> LoadPlan:
        return self.inner.create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.inner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.inner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("loader", LOADERS)
def test_a_planner_without_a_state_dict_loads_but_cannot_have_zeros(
    tmp_path: Path, loader: Any
) -> None:
    save({"t": torch.ones(3)}, tmp_path)
    state = {"t": torch.zeros(3)}
    loader(state, tmp_path, planner=WithoutStateDict())
    assert (state["t"] == 1).all()
    cause = refusal(lambda: loader(state, tmp_path, planner=WithoutStateDict(), zero_fill=True))
    assert type(cause) is CheckpointError
    assert str(cause).startswith(
        "zero_fill and allow_shape_mismatch need a planner with a state_dict attr"
    )
    assert str(cause).endswith("WithoutStateDict has none")


class Failing(dcp.DefaultLoadPlanner):
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        raise Corrupt(f"planner's own: {read_item.dest_index.fqn}")


def test_an_exception_of_a_hook_fails_the_load(tmp_path: Path) -> None:
    save({"t": torch.ones(3)}, tmp_path)
    cause = refusal(lambda: load({"t": torch.zeros(3)}, tmp_path, planner=Failing()))
    assert str(cause) == "planner's own: t"
