"""Scalars and histograms of a step, with a real TensorBoard if it is installed."""

from __future__ import annotations

import logging
import math
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from torch_ckpt.training import log


@dataclass
class Recorded:
    """Records the calls that a SummaryWriter would get."""

    scalars: list[tuple[str, float, int]] = field(default_factory=list)
    histograms: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def add_histogram(self, tag: str, values: torch.Tensor, global_step: int) -> None:
        self.histograms.append((tag, values, global_step))


class Norms(NamedTuple):
    first: float
    second: float


@dataclass
class Result:
    loss: float
    norms: Norms


def recorded(output: Any) -> Recorded:
    logger = Recorded()
    log(3, logger, output)
    return logger


def scalar(output: Any) -> float:
    [(_, value, _)] = recorded(output).scalars
    return value


def histogram(output: Any) -> torch.Tensor:
    [(_, values, _)] = recorded(output).histograms
    return values


def refusal(output: Any) -> str:
    logger = Recorded()
    with pytest.raises(ValueError, match="cannot be logged") as failure:
        log(3, logger, output)
    assert logger == Recorded()
    return str(failure.value)


# --- names ---------------------------------------------------------------------------------------


def test_names_are_the_keys_on_the_path() -> None:
    output = {
        "loss": 1.0,
        "layers": [{"norm": 2.0}, {"norm": 3.0}],
        "pair": (4.0, 5.0),
        "result": Result(6.0, Norms(7.0, 8.0)),
        "ordered": OrderedDict({7: 9.0}),
        "deque": deque([10.0]),
    }
    names = [
        *("loss", "layers/0/norm", "layers/1/norm", "pair/0", "pair/1"),
        *("result/loss", "result/norms/first", "result/norms/second", "ordered/7", "deque/0"),
    ]
    assert recorded(output).scalars == [(name, n, 3) for n, name in enumerate(names, start=1)]


def test_a_value_without_a_tree_is_the_output() -> None:
    assert recorded(torch.tensor(0.5)).scalars == [("output", 0.5, 3)]


def test_two_values_of_one_name_are_refused() -> None:
    assert "'a/b': two values have this name" in refusal({"a": {"b": 1.0}, "a/b": 2.0})


# --- scalars and histograms ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *(2, 2.0, True, torch.tensor(True)),
        *(np.float32(2), np.int64(2), np.array(2.0)),
        torch.tensor(2),
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.tensor(2.0, dtype=torch.float8_e4m3fn),
        torch.tensor(2, dtype=torch.uint16),
        torch.tensor(2.0, requires_grad=True),
        torch.nn.Parameter(torch.tensor(2.0)),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_numbers_and_tensors_without_dimensions_are_scalars(value: Any) -> None:
    assert scalar({"x": value}) == (value.item() if hasattr(value, "item") else value)


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        (torch.tensor([[1, 2], [3, 4]]), [1, 2, 3, 4]),
        (torch.tensor([2.0]), [2.0]),
        (np.arange(3.0)[::-1], [2, 1, 0]),
        *(
            (torch.tensor([3, 1], dtype=dtype), [3, 1])
            for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2)
        ),
        (torch.tensor([3, 1], dtype=torch.uint8), [3, 1]),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_any_array_with_dimensions_is_a_histogram_of_its_elements(
    value: Any, elements: list[float]
) -> None:
    assert histogram({"x": value}).tolist() == elements


def test_nonfinite_values_are_counted_by_a_scalar_and_not_in_a_histogram() -> None:
    logger = recorded({"x": torch.tensor([1, math.nan, -math.inf, 2])})
    assert logger.scalars == [("x/nonfinite", 2.0, 3)]
    assert logger.histograms[0][1].tolist() == [1, 2]
    assert recorded({"x": torch.full((4,), math.nan)}).histograms == []
    assert math.isnan(scalar({"x": torch.tensor(math.nan)}))


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda: None, "None"),
        (lambda: "text", "a str"),
        (lambda: 1j, "a complex"),
        (lambda: 10**400, "int too large to convert to float"),
        (lambda: Recorded, "a type"),
        (lambda: np.array(["a"]), "can't convert np.ndarray of type numpy.str_"),
        (lambda: np.datetime64("2026-01-01"), "can't convert np.ndarray of type numpy.datetime64"),
        (lambda: torch.zeros(2, dtype=torch.complex64), "a Tensor of torch.complex64"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
            "a Tensor of torch.qint8",
        ),
        (
            lambda: torch.zeros(2, dtype=torch.float4_e2m1fn_x2),
            "a Tensor of torch.float4_e2m1fn_x2",
        ),
        (lambda: torch.eye(2).to_sparse(), "a Tensor of torch.float32, torch.sparse_coo"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2)]),
            "a Tensor of torch.float32, torch.strided, nested, on cpu",
        ),
        (
            lambda: torch.zeros(2, device="meta"),
            "a Tensor of torch.float32, torch.strided, shape (2,), on meta",
        ),
        (
            lambda: torch.zeros(0, 4),
            "a Tensor of torch.float32, torch.strided, shape (0, 4), on cpu",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
def test_values_that_cannot_be_logged_are_refused_by_name(
    value: Callable[[], Any], reason: str
) -> None:
    assert f"'layers/0/x': {reason}" in refusal({"loss": 1.0, "layers": [{"x": value()}]})


def test_a_fake_tensor_is_refused() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(2)
    assert "'x': a FakeTensor" in refusal({"x": fake})


def test_one_error_names_eight_refused_values_and_counts_the_others() -> None:
    assert "'a': None, 'c': a str." in refusal({"a": None, "b": 1.0, "c": "text"})
    assert "'7': None and 3 more." in refusal([None] * 11)


def test_a_step_may_be_a_tensor_and_has_no_fraction() -> None:
    with pytest.raises(TypeError, match="float"):
        log(1.5, None, {})  # type: ignore[arg-type]
    logger = Recorded()
    log(torch.tensor(8), logger, {"x": 1.0})
    assert logger.scalars == [("x", 1.0, 8)]


# --- loggers -------------------------------------------------------------------------------------

OUTPUT = {"loss": 0.25, "tokens": 1024, "w": torch.tensor([1.0, 2.0, 3.0, math.inf])}
LINE = "step 3: loss=0.25, tokens=1024, w={mean=2, std=0.816497, min=1, max=3, n=3}, w/nonfinite=1"


@pytest.mark.parametrize(
    ("output", "line"),
    [(OUTPUT, LINE), ({"a\nb": 1.0}, "step 3: a\\nb=1"), ({}, "step 3")],
    ids=["values", "a newline in a name", "nothing"],
)
def test_without_a_logger_a_step_is_printed_on_one_line(
    capsys: pytest.CaptureFixture[str], output: Any, line: str
) -> None:
    log(3, None, output)
    assert capsys.readouterr().out == line + "\n"


@pytest.mark.parametrize("adapt", [lambda it: it, lambda it: logging.LoggerAdapter(it, {})])
def test_pythons_loggers_get_one_record_that_names_the_caller(
    adapt: Callable[[logging.Logger], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "training")
    log(3, adapt(logging.getLogger("training")), OUTPUT)
    assert caplog.messages == [LINE]
    assert caplog.records[0].pathname == __file__


def test_an_unsupported_logger_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"dict.*add_scalar"):
        log(3, {}, OUTPUT)  # type: ignore[arg-type]


def test_a_value_that_the_logger_rejects_is_named() -> None:
    class Picky(Recorded):
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            raise ValueError("no")

    with pytest.raises(ValueError, match="step 3: the logger rejects 'loss': no"):
        log(3, Picky(), OUTPUT)


def test_tensorboard_shows_scalars_and_histograms(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        log(3, writer, {"loss": torch.tensor(0.25), "w": torch.ones(4, 2, dtype=torch.bfloat16)})
    events = EventAccumulator(str(tmp_path)).Reload()
    [loss] = events.Scalars("loss")
    [weights] = events.Histograms("w")
    assert (loss.step, loss.value) == (3, 0.25)
    assert (weights.step, weights.histogram_value.num, weights.histogram_value.sum) == (3, 8, 8.0)


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fetching_tensors_synchronizes_with_a_device_at_most_once() -> None:
    output = {
        "loss": torch.tensor(0.25, device="cuda"),
        "w": torch.arange(6.0, device="cuda").view(2, 3).t(),
        "n": torch.tensor(7, device="cuda"),
    }
    recorded(output)  # The first call may synchronize for initialization.
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logger = recorded(output)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert sum("synchronizing CUDA operation" in str(warning.message) for warning in caught) <= 1
    assert logger.scalars == [("loss", 0.25, 3), ("n", 7.0, 3)]
    assert logger.histograms[0][1].tolist() == [0, 3, 1, 4, 2, 5]


@dataclass
class Output(OrderedDict[str, Any]):
    """A mapping without its empty fields, like the outputs of models in transformers."""

    loss: torch.Tensor
    attentions: None = None

    def __post_init__(self) -> None:
        self["loss"] = self.loss


def test_a_mapping_that_is_a_dataclass_is_logged_by_its_items() -> None:
    assert recorded(Output(torch.tensor(2.0))).scalars == [("loss", 2.0, 3)]
