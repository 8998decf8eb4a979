"""A training step whose duration shows the cost of a concurrent save.

The step consists of many small operations on one thread, driven by Python, so it competes with a
save mainly for the GIL and a core. Its parameters are not part of the saved state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_LAYERS = 8
_HEADS = 8
_WIDTH = 32
_TOKENS = 16
_BATCH = 2


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch compute on one thread, as torchrun does by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Layer(nn.Module):
    """A transformer layer with separate matrices for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(_WIDTH, 3 * _WIDTH // _HEADS) for _ in range(_HEADS))
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(_WIDTH, 2 * _WIDTH), nn.ReLU(), nn.Linear(2 * _WIDTH, _WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = []
        for head in self.heads:
            query, key, value = head(x).chunk(3, -1)
            attended.append(torch.softmax(query @ key.transpose(1, 2), -1) @ value)
        x = x + self.out(torch.cat(attended, -1))
        added: torch.Tensor = self.mlp(x)
        return x + added


class Training:
    """A tiny transformer and its optimizer on a device. A step takes about 10 ms on one core."""

    def __init__(self, device: str = "cpu") -> None:
        self._model = nn.Sequential(*(_Layer() for _ in range(_LAYERS))).to(device)
        # With foreach, a step would be a few large operations.
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=1e-3, momentum=0.9, foreach=False
        )
        self._input = torch.randn((_BATCH, _TOKENS, _WIDTH), device=device)

    def step(self) -> None:
        """Runs forward, backward and update on the calling thread."""
        loss = (self._model(self._input) - self._input).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
