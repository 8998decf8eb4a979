"""Finds tensors whose elements share memory, so that a load cannot fill each element in place."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import torch


class FilledMemory:
    """The memory of the tensors that a load fills in place."""

    def __init__(self) -> None:
        # The tensors, in the order of their addresses.
        self._begins: list[int] = []
        self._tensors: list[torch.Tensor] = []
        self._longest = 0

    def add(self, tensor: torch.Tensor) -> bool:
        """Adds a tensor. Returns False if any of its elements may share memory with each other or
        with an added tensor; then it is not added.

        Args:
            tensor: strided tensor, which is not on the meta device.
        """
        if not tensor.numel():
            return True
        if overlaps_itself(tensor):
            return False
        begin, size = tensor.data_ptr(), _range_bytes(tensor)
        first = bisect_left(self._begins, begin - self._longest)
        end = bisect_left(self._begins, begin + size)
        if not all(_are_disjoint(tensor, other) for other in self._tensors[first:end]):
            return False
        at = bisect_left(self._begins, begin)
        self._begins.insert(at, begin)
        self._tensors.insert(at, tensor)
        self._longest = max(self._longest, size)
        return True


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Returns True if elements of a strided tensor may share memory, as in an expanded tensor."""
    return tensor.numel() > 0 and not _are_distinct(zip(tensor.stride(), tensor.shape, strict=True))


def _range_bytes(tensor: torch.Tensor) -> int:
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return (1 + sum(stride * (size - 1) for stride, size in steps)) * tensor.element_size()


def _are_disjoint(some: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True if two tensors have no common element, for example two columns of a matrix.
    False if their strides do not prove this."""
    first, second = sorted((some, other), key=torch.Tensor.data_ptr)
    distance = second.data_ptr() - first.data_ptr()
    if distance >= _range_bytes(first):
        return True
    item_bytes = first.element_size()
    if item_bytes != second.element_size() or distance % item_bytes:
        return False
    # Divide the distance into steps along the strides, which gives the elements of both tensors
    # coordinates.
    distance //= item_bytes
    sizes_of_first, sizes_of_second = _sizes_by_stride(first), _sizes_by_stride(second)
    is_separate, bounds = False, []
    for stride in sorted({1, *sizes_of_first, *sizes_of_second}, reverse=True):
        begin, distance = divmod(distance, stride)
        end_of_first = sizes_of_first.get(stride, 1)
        is_separate |= begin >= end_of_first
        bounds.append((stride, max(end_of_first, begin + sizes_of_second.get(stride, 1))))
    return is_separate and _are_distinct(bounds)


def _are_distinct(sizes_by_stride: Iterable[tuple[int, int]]) -> bool:
    """Returns True if no two coordinates below the sizes belong to the same element: each step
    exceeds the steps along all smaller strides."""
    reach = 0
    for stride, size in sorted(sizes_by_stride):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _sizes_by_stride(tensor: torch.Tensor) -> dict[int, int]:
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return {stride: size for stride, size in steps if size > 1}
