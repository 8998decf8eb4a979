"""Tests of the watch that detects writes to the sources of a background save."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from torch_ckpt import _C


def watch_of(holder: SimpleNamespace) -> _C.SourceWatch:
    """Watches the tensor that the holder may replace."""
    watch = _C.SourceWatch()
    watch.add("weight", holder.tensor.detach(), holder, "tensor")
    return watch


CHANGES: dict[str, Callable[[SimpleNamespace], object]] = {
    "replaced by a larger one": lambda holder: setattr(holder, "tensor", torch.zeros(5)),
    "replaced by an equal one": lambda holder: setattr(holder, "tensor", holder.tensor.clone()),
    "replaced by an object": lambda holder: setattr(holder, "tensor", None),
    "written in place": lambda holder: holder.tensor.add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_replaced_or_written_tensor_is_reported(change: str) -> None:
    holder = SimpleNamespace(tensor=torch.zeros(3))
    watch = watch_of(holder)
    CHANGES[change](holder)
    assert watch.changed() == ["weight"]


def test_an_alias_in_place_of_the_tensor_is_no_change() -> None:
    holder = SimpleNamespace(tensor=torch.zeros(3))
    watch = watch_of(holder)
    holder.tensor = holder.tensor.detach()
    assert watch.changed() == []


def test_a_name_of_several_changed_tensors_is_reported_once() -> None:
    watch = _C.SourceWatch()
    tensors = [torch.zeros(2) for _ in range(3)]
    for name, tensor in zip(["shards", "other", "shards"], tensors, strict=True):
        watch.add(name, tensor)
    tensors[0].fill_(1)
    tensors[2].fill_(1)
    assert watch.changed() == ["shards"]


def test_an_inference_tensor_is_never_reported() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    watch = _C.SourceWatch()
    watch.add("weight", tensor)
    with torch.inference_mode():
        tensor.add_(1)
    assert watch.changed() == []


def test_a_released_watch_reports_nothing_and_host_memory_has_no_devices() -> None:
    tensor = torch.zeros(2)
    watch = _C.SourceWatch()
    watch.add("weight", tensor)
    assert watch.devices == []
    tensor.add_(1)
    watch.release()
    assert watch.changed() == []


def test_an_error_of_the_holder_is_raised() -> None:
    holder = SimpleNamespace(tensor=torch.zeros(3))
    watch = watch_of(holder)
    del holder.tensor
    with pytest.raises(AttributeError, match="tensor"):
        watch.changed()


class AskingHolder(SimpleNamespace):
    """A holder that asks the watch for changes while the watch releases it."""

    def __del__(self) -> None:
        self.found.append(self.watch.changed())


def test_a_watch_is_empty_while_its_release_destroys_the_holders() -> None:
    watch = _C.SourceWatch()
    found: list[list[str]] = []
    tensors = [torch.zeros(2) for _ in range(3)]
    for tensor in tensors:
        holder = AskingHolder(tensor=tensor, watch=watch, found=found)
        watch.add("weight", tensor, holder, "tensor")
        del holder
        tensor.add_(1)
    watch.release()
    assert found == [[], [], []]
