"""``convert`` with a selection, new names or another dtype, and of steps of a manager."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import torch_ckpt
from tests.commands import Run
from tests.conversions import names_in
from tests.support import assert_equal, save
from torch_ckpt import CheckpointError, PerRank, RNGState, convert
from torch_ckpt.conversion.convert import ConvertReport

STATE = {
    "model": {"layer.weight": torch.randn(4, 3), "layer.count": torch.arange(3)},
    "optimizer": {"state": {"layer.weight": {"exp_avg": torch.ones(4, 3)}}},
    "step": 5,
}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    save(STATE, tmp_path / "step")
    return tmp_path / "step"


def converted(source: Path, **options: Any) -> tuple[dict[str, torch.Tensor], ConvertReport]:
    target = source.parent / "m.safetensors"
    report = convert(source, target, **options)
    return safetensors.torch.load_file(target), report


# --- names ---------------------------------------------------------------------------------------


def test_selected_names_lose_their_prefix_before_they_are_renamed(step: Path) -> None:
    found, report = converted(step, select=["model.*"], strip_prefix="model.")
    assert_equal(dict(sorted(found.items())), dict(sorted(STATE["model"].items())))  # type: ignore
    assert (report.tensors, report.objects) == (2, 0)
    options = {"select": ["model.*", "step"], "strip_prefix": "model.", "overwrite": True}
    renames = {"layer.*": "h.*", "step": "n"}
    found, _report = converted(step, **options, rename=renames, tensors_only=True)
    assert sorted(found) == ["h.count", "h.weight"]


def test_a_value_without_its_first_key_keeps_its_nesting(step: Path, tmp_path: Path) -> None:
    options: Any = {"select": ["optimizer.*"], "strip_prefix": "optimizer."}
    convert(step, tmp_path / "m.pt", **options)
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert_equal(loaded, STATE["optimizer"])


def test_a_selection_becomes_a_valid_checkpoint(step: Path, tmp_path: Path) -> None:
    convert(step, tmp_path / "part", select=["model.*"], rename={"model.*": "net.*"})
    state = {"net": {"layer.weight": torch.zeros(4, 3), "layer.count": torch.zeros(3).long()}}
    torch_ckpt.load(state, tmp_path / "part")
    assert_equal(state["net"], STATE["model"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"select": ["modle.*"]}, r"select: no name matches 'modle\.\*'; the source has model"),
        ({"select": "model.*"}, "select must be a list of patterns"),
        ({"strip_prefix": "net."}, r"strip_prefix: no name matches 'net\.\*'"),
        ({"strip_prefix": "model*"}, "strip_prefix must be a string"),
        ({"rename": {"net.*": "x.*"}}, r"rename: no name matches 'net\.\*'"),
        ({"rename": {"*.weight": "*.count"}}, r"rename: both .* would become model\.layer\.count"),
        ({"dtype": "int8"}, "dtype must be a floating-point dtype"),
        ({"dtype": "bf17"}, "dtype must be a floating-point dtype"),
    ],
    ids=str,
)
def test_options_that_match_no_name_are_refused(
    step: Path, tmp_path: Path, options: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        convert(step, tmp_path / "m.pt", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step"]


# --- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.bfloat16], ids=str)
def test_only_floating_point_tensors_change_their_dtype(step: Path, dtype: Any) -> None:
    found, report = converted(step, select=["model.*"], dtype=dtype, max_host_bytes=1)
    weight = STATE["model"]["layer.weight"]  # type: ignore[index]
    assert_equal(found["model.layer.weight"], weight.bfloat16())
    assert found["model.layer.count"].dtype == torch.int64
    assert report.bytes == 4 * 3 * 2 + 3 * 8
    assert report.notes == []


def test_values_that_overflow_a_dtype_are_noted(tmp_path: Path) -> None:
    save({"large": torch.tensor([1e5, 1.0]), "inf": torch.tensor([torch.inf])}, tmp_path / "step")
    _found, report = converted(tmp_path / "step", dtype="fp16")
    assert report.notes == [
        "large has values that overflow torch.float16 and became infinite or NaN"
    ]


# --- transformers --------------------------------------------------------------------------------


def test_transformers_loads_a_converted_step_without_missing_keys(tmp_path: Path, run: Run) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    with torch_ckpt.CheckpointManager(tmp_path / "run", interval=1) as manager:
        manager.save(1, {"model": model, "optimizer": optimizer, "rng": RNGState()})
    config.save_pretrained(tmp_path / "config")
    arguments = ["--select", "model.*", "--strip-prefix", "model.", "--dtype", "bf16"]
    source, target = str(tmp_path / "run/0000000001"), str(tmp_path / "hf")
    more = ["--config", str(tmp_path / "config"), "--max-shard-size", "2kB", "--json"]
    run("convert", source, target, *arguments, *more)
    found, info = transformers.GPT2LMHeadModel.from_pretrained(
        target, output_loading_info=True, dtype="auto", local_files_only=True
    )
    assert not any(info.values()), info
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    state = {name: tensor.bfloat16() for name, tensor in found.state_dict().items()}
    assert_equal(state, expected)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    # transformers ties lm_head.weight to transformer.wte.weight.
    assert sorted(index["weight_map"]) == sorted(expected.keys() - {"lm_head.weight"})
    assert found.config.dtype is torch.bfloat16


def test_tied_weights_that_differ_are_kept(step: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, head in (("equal", torch.ones(4, 2)), ("differ", torch.zeros(4, 2))):
        save({"lm_head.weight": head, "transformer.wte.weight": torch.ones(4, 2)}, tmp_path / name)
        report = convert(tmp_path / name, tmp_path / f"hf {name}", config=tmp_path)
        assert report.tensors == (1 if name == "equal" else 2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({}, {"torch_dtype": "bfloat16"}),
        (
            {"dtype": "float32", "text_config": {"dtype": "float32"}},
            {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}},
        ),
    ],
)
def test_the_dtype_is_written_into_the_configuration(
    step: Path, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(before))
    convert(step, tmp_path / "hf", select=["model.*"], config=tmp_path, dtype="bf16")
    assert json.loads((tmp_path / "hf/config.json").read_text()) == after


def test_a_directory_with_a_configuration_can_be_overwritten(step: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    options: Any = {"select": ["model.*"], "config": tmp_path / "config.json"}
    convert(step, tmp_path / "hf", **options)
    convert(step, tmp_path / "hf", **options, overwrite=True)
    names = ["config.json", "model.safetensors", "torch_ckpt.checksums"]
    assert names_in(tmp_path / "hf") == names
    assert (tmp_path / "hf/config.json").read_text() == '{"model_type": "x"}'


@pytest.mark.parametrize(
    ("text", "target", "error", "message"),
    [
        *((text, "hf", CheckpointError, "is not a JSON object") for text in ("[]", "{", "\xff")),
        ("{}", "m.pt", ValueError, "config writes a directory"),
    ],
)
def test_an_invalid_configuration_or_target_of_it_is_refused(
    step: Path, tmp_path: Path, text: str, target: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    with pytest.raises(error, match=message):
        convert(step, tmp_path / target, config=tmp_path)
    assert not (tmp_path / target).exists()


# --- a manager's step as a file of torch.save ----------------------------------------------------


def _program(steps: int, **options: Any) -> dict[str, Any]:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, **options)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": RNGState(),
        "own": PerRank({"position": 7}),
        "ema": {"decay": 0.5, "values": [torch.ones(2), 3]},
        "best": {"one": 1},
        "step": steps,
    }


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {}], ids=str)
def test_load_state_dict_accepts_the_states_of_a_converted_step(
    tmp_path: Path, options: dict[str, float]
) -> None:
    saved, fresh = _program(3, **options), _program(0, **options)
    torch_ckpt.save(saved, tmp_path / "step")
    report = convert(tmp_path / "step", tmp_path / "m.pt")
    assert report.notes == []
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    for key in ("model", "optimizer", "scheduler"):
        fresh[key].load_state_dict(loaded[key])
        assert_equal(fresh[key].state_dict(), saved[key].state_dict(), key)
    assert_equal(loaded["ema"], saved["ema"])
    assert (loaded["best"], loaded["step"]) == ({"one": 1}, 3)
    assert loaded["own"] == {"rank0": {"position": 7}}
    RNGState().load_state_dict(loaded["rng"]["rank0"])


def test_objects_that_torch_load_rejects_are_noted(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    save({"config": {"a": (numpy.arange(3),)}, "step": 3}, tmp_path / "step")
    (note,) = convert(tmp_path / "step", tmp_path / "m.pt").notes
    assert "weights_only=False" in note
    assert note.endswith("config.a")
