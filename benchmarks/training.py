"""A training step whose duration shows the cost of a concurrent save.

The step consists of many small operations on one thread, driven by Python, so it competes with a
save mainly for the GIL and a core. Its parameters are not part of the saved state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_LAYERS = 8
_HEADS = 8
_WIDTH = 32
_HEAD_WIDTH = _WIDTH // _HEADS
_TOKENS = 16
_BATCH = 2
_MOMENTUM = 0.9
_LEARNING_RATE = 1e-3


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch compute on one thread, as torchrun does by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Layer:
    """One transformer layer with separate matrices for each head."""

    def __init__(self, generator: torch.Generator, device: str) -> None:
        def matrix(rows: int, columns: int) -> Tensor:
            values = torch.randn((rows, columns), generator=generator) / math.sqrt(rows)
            return values.to(device).requires_grad_()

        self.heads = [
            (
                matrix(_WIDTH, _HEAD_WIDTH),
                matrix(_WIDTH, _HEAD_WIDTH),
                matrix(_WIDTH, _HEAD_WIDTH),
            )
            for _ in range(_HEADS)
        ]
        self.out = matrix(_WIDTH, _WIDTH)
        self.up = matrix(_WIDTH, 2 * _WIDTH)
        self.down = matrix(2 * _WIDTH, _WIDTH)

    def parameters(self) -> list[Tensor]:
        """All matrices."""
        of_heads = [matrix for head in self.heads for matrix in head]
        return [*of_heads, self.out, self.up, self.down]

    def __call__(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        attended = []
        for query, key, value in self.heads:
            scores = (centred @ query) @ (centred @ key).transpose(1, 2)
            weights = torch.softmax(scores / math.sqrt(_HEAD_WIDTH), -1)
            attended.append(weights @ (centred @ value))
        x = x + torch.cat(attended, -1) @ self.out
        return x + torch.relu(x @ self.up) @ self.down


class Training:
    """A tiny transformer and its optimizer on a device. A step takes about 10 ms on one core."""

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(seed)
        self._layers = [_Layer(generator, device) for _ in range(_LAYERS)]
        self._parameters = [p for layer in self._layers for p in layer.parameters()]
        self._velocities = [torch.zeros_like(p) for p in self._parameters]
        self._input = torch.randn((_BATCH, _TOKENS, _WIDTH), generator=generator).to(device)
        self._wanted = torch.randn((_BATCH, _TOKENS, _WIDTH), generator=generator).to(device)

    def step(self) -> None:
        """Runs forward, backward and update on the calling thread."""
        x = self._input
        for layer in self._layers:
            x = layer(x)
        loss = (x - self._wanted).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter, velocity in zip(self._parameters, self._velocities, strict=True):
                assert parameter.grad is not None
                velocity.mul_(_MOMENTUM).add_(parameter.grad)
                parameter.sub_(velocity, alpha=_LEARNING_RATE)
                parameter.grad = None
