"""Deltas that ``publish`` writes, applied to state dicts and directories."""

from __future__ import annotations

import filecmp
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_ckpt
from tests.support import StateDict, assert_equal, random_tensor


def model(seed: int = 1) -> StateDict:
    return {
        "embed.weight": random_tensor((300, 70), torch.bfloat16, seed),
        "norm.weight": random_tensor((70,), torch.float32, seed + 1),
        "steps": torch.arange(9),
        "empty": torch.empty(0, 3),
    }


def trained(state: StateDict) -> StateDict:
    """Returns a copy in which one element in thirty has changed."""
    copy = {name: value.clone() for name, value in state.items()}
    copy["embed.weight"].view(-1)[::30] += 1
    copy["steps"] += 1
    return copy


def publish(state: StateDict, root: Path, **options: Any) -> Path:
    return Path(torch_ckpt.publish(state, root, no_dist=True, **options).path)


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, Path]:
    """Two versions; the second has a delta."""
    root = tmp_path / "policy"
    return publish(model(), root), publish(trained(model()), root, delta=True)


def test_a_delta_changes_a_state_dict_in_place(versions: tuple[Path, Path]) -> None:
    state = model()
    embed = state["embed.weight"]
    torch_ckpt.apply_delta(versions[1] / "torch_ckpt.delta", state)
    assert state["embed.weight"] is embed
    assert_equal(state, trained(model()))


def test_a_delta_is_found_in_the_directory_of_its_version(versions: tuple[Path, Path]) -> None:
    state = model()
    torch_ckpt.apply_delta(versions[1], state)
    assert_equal(state, trained(model()))


def test_strided_tensors_and_parameters_are_changed(tmp_path: Path) -> None:
    base = {"t": random_tensor((40, 30), torch.float32, 1), "p": random_tensor((9,), torch.float32)}
    version = {name: value * 2 for name, value in base.items()}
    publish(base, tmp_path)
    delta = publish(version, tmp_path, delta=True)
    parameter = torch.nn.Parameter(base["p"].clone())
    state = {"t": base["t"].t().contiguous().t(), "p": parameter}
    seen = parameter._version
    torch_ckpt.apply_delta(delta, state)
    assert_equal(state["t"], version["t"])
    assert_equal(parameter.data, version["p"])
    assert parameter._version > seen, "autograd detects the change"


def test_nested_dicts_and_other_values_are_allowed(tmp_path: Path) -> None:
    publish({"model": {"w": torch.ones(5)}}, tmp_path)
    delta = publish({"model": {"w": torch.ones(5) * 3}}, tmp_path, delta=True)
    state = {"model": {"w": torch.ones(5)}, "step": 3}
    torch_ckpt.apply_delta(delta, state)
    assert_equal(state["model"]["w"], torch.ones(5) * 3)


def test_tied_tensors_are_changed_once(tmp_path: Path) -> None:
    weight = random_tensor((50, 4), torch.float32, 1)
    publish({"a": weight, "b": weight.clone()}, tmp_path)
    delta = publish({"a": weight + 1, "b": weight + 1}, tmp_path, delta=True)
    for tied in (weight.clone(), weight.t().contiguous().t()):
        torch_ckpt.apply_delta(delta, {"a": tied, "b": tied})
        assert_equal(tied, weight + 1)


def test_tied_tensors_for_which_the_version_has_two_values_are_refused(tmp_path: Path) -> None:
    weight = random_tensor((50, 4), torch.float32, 1)
    publish({"a": weight, "b": weight.clone()}, tmp_path)
    delta = publish({"a": weight + 1, "b": weight + 2}, tmp_path, delta=True)
    for tied in (weight.clone(), weight.t().contiguous().t()):
        with pytest.raises(ValueError, match=r"b: .*shares memory with a"):
            torch_ckpt.apply_delta(delta, {"a": tied, "b": tied})
        assert_equal(tied, weight)


@pytest.mark.parametrize("share", [lambda t: t.t(), lambda t: t[1:], lambda t: t.view(-1)[2:]])
def test_tensors_that_share_memory_in_another_way_are_refused(
    tmp_path: Path, share: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    weight = random_tensor((50, 50), torch.float32, 1)
    state = {"a": weight, "b": share(weight)}
    publish({name: value.clone() for name, value in state.items()}, tmp_path)
    delta = publish({name: value + 1 for name, value in state.items()}, tmp_path, delta=True)
    before = weight.clone()
    with pytest.raises(ValueError, match=r"b: the tensor shares memory with a"):
        torch_ckpt.apply_delta(delta, state)
    assert_equal(weight, before)


def test_a_tensor_whose_elements_share_memory_is_refused(tmp_path: Path) -> None:
    publish({"a": torch.ones(9), "b": torch.ones(5)}, tmp_path)
    delta = publish({"a": torch.zeros(9), "b": torch.zeros(5)}, tmp_path, delta=True)
    state = {"a": torch.ones(9), "b": torch.ones(1).expand(5)}
    with pytest.raises(ValueError, match="b: several elements of the tensor share memory"):
        torch_ckpt.apply_delta(delta, state)
    assert_equal(state["a"], torch.ones(9))


def test_inference_tensors_and_conjugated_views_are_changed(tmp_path: Path) -> None:
    base = {"a": torch.ones(4, 3), "b": torch.ones(9), "c": torch.full((5,), 1 + 2j)}
    publish(base, tmp_path)
    delta = publish({name: value * 3 for name, value in base.items()}, tmp_path, delta=True)
    with torch.inference_mode():
        state = {"a": torch.ones(3, 4).t(), "b": torch.ones(9)}
    state["c"] = torch.full((5,), 1 - 2j).conj()
    torch_ckpt.apply_delta(delta, state)
    for name, value in base.items():
        assert torch.equal(state[name], value * 3), name


def test_a_replicated_dtensor_is_changed_and_a_sharded_one_refused(
    versions: tuple[Path, Path], one_rank_mesh: DeviceMesh
) -> None:
    state = model()
    state["norm.weight"] = DTensor.from_local(state["norm.weight"], one_rank_mesh, [Replicate()])
    torch_ckpt.apply_delta(versions[1], state)
    assert_equal(state["embed.weight"], trained(model())["embed.weight"])
    state = model()
    state["norm.weight"] = DTensor.from_local(state["norm.weight"], one_rank_mesh, [Shard(0)])
    with pytest.raises(torch_ckpt.CheckpointError, match=r"norm\.weight: .*sharded"):
        torch_ckpt.apply_delta(versions[1], state)


def test_another_base_is_refused_and_not_changed(versions: tuple[Path, Path]) -> None:
    state = model()
    state["norm.weight"][3] += 1
    before = {name: value.clone() for name, value in state.items()}
    with pytest.raises(torch_ckpt.CheckpointError, match=r"norm\.weight: .*base \(0000000000\)"):
        torch_ckpt.apply_delta(versions[1], state)
    assert_equal(state, before)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", None, "lacks tensors that the delta changes: steps"),
        ("steps", torch.arange(10), "steps: the tensor has dtype torch.int64 and shape \\[10\\]"),
        ("norm.weight", torch.ones(70).half(), "norm.weight: the tensor has dtype torch.float16"),
        ("norm.weight", torch.ones(70, device="meta"), "norm.weight: .* only dense tensors"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    versions: tuple[Path, Path], name: str, value: torch.Tensor | None, message: str
) -> None:
    state = model()
    if value is None:
        del state[name]
    else:
        state[name] = value
    with pytest.raises(torch_ckpt.CheckpointError, match=message):
        torch_ckpt.apply_delta(versions[1], state)
    assert_equal(state["embed.weight"], model()["embed.weight"])


# --- directories ---------------------------------------------------------------------------------


def files_in(directory: Path) -> list[str]:
    return sorted(set(os.listdir(directory)) - {"torch_ckpt.delta"})


def assert_same_files(one: Path, other: Path) -> None:
    assert files_in(one) == files_in(other)
    for name in files_in(one):
        assert filecmp.cmp(one / name, other / name, shallow=False), name


def test_a_directory_becomes_the_version_byte_for_byte(versions: tuple[Path, Path]) -> None:
    base, version = versions
    weights = base.parent.parent / "weights"
    weights.mkdir()
    for name in files_in(base):
        (weights / name).write_bytes((base / name).read_bytes())
    torch_ckpt.apply_delta(version, weights)
    assert_same_files(weights, version)
    assert torch_ckpt.verify(weights).ok
    assert not [name for name in os.listdir(weights.parent) if name.startswith(".")]


def test_out_keeps_the_base(versions: tuple[Path, Path], tmp_path: Path) -> None:
    base, version = versions
    torch_ckpt.apply_delta(version, base, out=tmp_path / "made")
    assert_same_files(tmp_path / "made", version)
    assert_equal(safetensors.torch.load_file(base / "model.safetensors")["steps"], torch.arange(9))
    (tmp_path / "empty").mkdir()
    for existing in ("made", "empty"):
        with pytest.raises(FileExistsError, match="choose another directory"):
            torch_ckpt.apply_delta(version, base, out=tmp_path / existing)
    with pytest.raises(ValueError, match="out is for directories"):
        torch_ckpt.apply_delta(version, model(), out=tmp_path / "other")


def test_a_directory_with_other_values_stays_as_it_is(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    torch_ckpt.save(model(5), other, format="safetensors", no_dist=True)
    before = {name: (other / name).read_bytes() for name in files_in(other)}
    with pytest.raises(torch_ckpt.CheckpointError, match="apply the delta to its base"):
        torch_ckpt.apply_delta(versions[1], other)
    assert {name: (other / name).read_bytes() for name in files_in(other)} == before
    assert sorted(os.listdir(tmp_path)) == ["other", "policy"]


def test_a_published_version_is_not_replaced(versions: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="is a published version, which must not change"):
        torch_ckpt.apply_delta(versions[1], versions[0])
    assert_equal(
        safetensors.torch.load_file(versions[0] / "model.safetensors")["steps"], model()["steps"]
    )


@contextmanager
def open_files_limited_to(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_delta_of_more_files_than_a_process_may_open_is_made_and_applied(tmp_path: Path) -> None:
    state = {f"layers.{i}": torch.full((8,), float(i)) for i in range(60)}
    with open_files_limited_to(len(os.listdir("/proc/self/fd")) + 30):
        publish(state, tmp_path / "root", format=torch_ckpt.Safetensors(max_shard_size=32))
        changed = {name: value + 1 for name, value in state.items()}
        version = publish(
            changed, tmp_path / "root", format=torch_ckpt.Safetensors(max_shard_size=32), delta=True
        )
        base = version.with_name("0000000000")
        torch_ckpt.apply_delta(version, base, out=tmp_path / "made")
    assert_same_files(tmp_path / "made", version)


def test_a_missing_delta_is_reported_with_its_path(versions: tuple[Path, Path]) -> None:
    with pytest.raises(FileNotFoundError, match=r"0000000000/torch_ckpt\.delta"):
        torch_ckpt.apply_delta(versions[0], model())


def test_a_delta_beneath_a_url_is_refused() -> None:
    with pytest.raises(ValueError, match="is a URL, and a local path is needed here"):
        torch_ckpt.apply_delta("s3://bucket/policy/0000000001", {})
