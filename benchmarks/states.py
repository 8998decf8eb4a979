"""The states that are saved and loaded: a training state of a decoder, and many small tensors.

A state may be sharded over ranks. What is said of its tensors is then said of this rank's parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

State = dict[str, Any]

# Parameters a decoder has beside its layers (two embeddings, head, final norm) and per layer.
_OUTER_PARAMETERS = 4
_PARAMETERS_PER_LAYER = 6
_FLOAT_BYTES = 4
# A parameter and its two Adam moments.
_COPIES_OF_A_PARAMETER = 3
# Numbers of rows that 2, 3, 4 and 8 ranks cannot share evenly: remainders for the period of 24.
_PERIOD = 24
_REMAINDERS = (1, 5, 7, 11, 13, 17, 19, 23)
SMALLEST_TENSOR_COUNT = _COPIES_OF_A_PARAMETER * (_OUTER_PARAMETERS + _PARAMETERS_PER_LAYER)


def _decoder_shapes(parameter_bytes: int, parameter_count: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder with `parameter_count` fp32 parameters of `parameter_bytes` bytes in all.

    The proportions are those of a small language model: the two vocabulary matrices hold 28 rows
    per unit of width (32,000 rows at the width of 1,140 that 2 GB lead to), each layer 12 width^2.
    """
    layers, biases = divmod(parameter_count - _OUTER_PARAMETERS, _PARAMETERS_PER_LAYER)
    numel = parameter_bytes // _FLOAT_BYTES
    width = int((numel / (12 * layers + 2 * 28)) ** 0.5)
    step = 64 if width >= 512 else 8
    width = max(step, width // step * step)
    positions = 2 * width
    outside_vocabulary = width * (
        12 * width * layers + positions + 2 * layers + 1 + biases
    )  # layers, positions, norms and spare biases
    # The vocabulary takes up what rounding the width has left over.
    vocabulary = max(1, (numel - outside_vocabulary) // (2 * width))

    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (vocabulary, width),
        "positions.weight": (positions, width),
    }
    for layer in range(layers):
        prefix = f"layers.{layer}"
        shapes[f"{prefix}.attention.qkv.weight"] = (3 * width, width)
        shapes[f"{prefix}.attention.out.weight"] = (width, width)
        shapes[f"{prefix}.attention_norm.weight"] = (width,)
        shapes[f"{prefix}.mlp.up.weight"] = (4 * width, width)
        shapes[f"{prefix}.mlp.down.weight"] = (width, 4 * width)
        shapes[f"{prefix}.mlp_norm.weight"] = (width,)
    for bias in range(biases):
        shapes[f"biases.{bias}"] = (width,)
    shapes["norm.weight"] = (width,)
    shapes["head.weight"] = (vocabulary, width)
    return shapes


def training_state(
    total_bytes: int, tensor_count: int, seed: int = 0, device: str = "cpu"
) -> State:
    """An fp32 model with its Adam state, as a training script would save it.

    `total_bytes` is met to within a few rows of the embedding. `tensor_count` counts parameters and
    moments, which are on `device`. Adam's 0-d step tensors, on the CPU as Adam has them, and the
    script's own numbers come on top.
    """
    if tensor_count < SMALLEST_TENSOR_COUNT:
        raise ValueError(
            f"a training state needs at least {SMALLEST_TENSOR_COUNT} tensors (one layer), "
            f"got {tensor_count}"
        )
    shapes = _decoder_shapes(
        total_bytes // _COPIES_OF_A_PARAMETER, tensor_count // _COPIES_OF_A_PARAMETER
    )
    generator = torch.Generator(device).manual_seed(seed)
    model: State = {}
    moments: State = {}
    for name, shape in shapes.items():
        model[name] = torch.rand(shape, generator=generator, device=device)
        moments[name] = {
            "step": torch.tensor(1000.0),
            "exp_avg": torch.rand(shape, generator=generator, device=device),
            "exp_avg_sq": torch.rand(shape, generator=generator, device=device),
        }
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": {"lr": 3e-4, "weight_decay": 0.1}},
        "step": 1000,
        "tokens_seen": 4_194_304_000,
    }


def small_tensors_state(
    count: int, tensor_bytes: int = 1024, seed: int = 0, device: str = "cpu"
) -> State:
    """`count` fp32 tensors of `tensor_bytes` bytes on `device`.

    Each owns its storage: views into one large storage would make the stock writer copy every one.
    """
    generator = torch.Generator(device).manual_seed(seed)
    numel = tensor_bytes // _FLOAT_BYTES
    return {
        f"layers.{index}.weight": torch.rand(numel, generator=generator, device=device)
        for index in range(count)
    }


def uneven_state(total_bytes: int, matrices: int, seed: int = 0) -> State:
    """fp32 matrices with a bias each, whose rows neither 2, 3, 4 nor 8 ranks can share evenly.

    `total_bytes` is met to within two dozen rows of each matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    numel = total_bytes // _FLOAT_BYTES // matrices
    columns = max(1, 1 << (numel.bit_length() // 2))
    state: State = {}
    for index in range(matrices):
        rows = numel // columns // _PERIOD * _PERIOD + _REMAINDERS[index % len(_REMAINDERS)]
        state[f"layers.{index}.weight"] = torch.rand((rows, columns), generator=generator)
        state[f"layers.{index}.bias"] = torch.rand(rows, generator=generator)
    return state


def _shard(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A copy of this rank's rows, as FSDP2 would hold them."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    rows = tensor.shape[0]
    begin, end = (min(rows, -(-rows // ranks) * bound) for bound in (rank, rank + 1))
    return _as_dtensor(tensor[begin:end].clone(), mesh, tensor)


def _as_dtensor(part: torch.Tensor, mesh: DeviceMesh, whole: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def sharded(state: State, mesh: DeviceMesh) -> State:
    """The state with this rank's rows of every tensor; tensors without dimensions stay whole."""
    shards: State = {}
    for key, value in state.items():
        if isinstance(value, dict):
            shards[key] = sharded(value, mesh)
        elif isinstance(value, torch.Tensor) and value.dim():
            shards[key] = _shard(value, mesh)
        else:
            shards[key] = value
    return shards


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def leaves(state: State, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of the nested dictionaries, with its dotted path."""
    for key, value in state.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            yield from leaves(value, path)
        else:
            yield path, value


def tensors(state: State) -> list[torch.Tensor]:
    """Every tensor of the state, in order."""
    return [_local(value) for _, value in leaves(state) if isinstance(value, torch.Tensor)]


def payload_bytes(state: State) -> int:
    """Bytes of all tensors: what a checkpoint of the state holds beside headers and metadata."""
    return sum(tensor.nbytes for tensor in tensors(state))


def blank_copy(state: State) -> State:
    """A state of the same structure that holds zeros, with its memory already faulted in."""
    blank: State = {}
    for key, value in state.items():
        if isinstance(value, dict):
            blank[key] = blank_copy(value)
        elif isinstance(value, torch.Tensor):
            # torch.zeros leaves a large block to the kernel's shared zero page until it is touched.
            zeros = torch.empty_like(_local(value)).zero_()
            if isinstance(value, DTensor):
                zeros = _as_dtensor(zeros, value.device_mesh, value)
            blank[key] = zeros
        else:
            blank[key] = type(value)()
    return blank


def wipe(state: State) -> None:
    """Sets every leaf to zero in place, so that a load which did nothing is noticed."""
    for key, value in state.items():
        if isinstance(value, dict):
            wipe(value)
        elif isinstance(value, torch.Tensor):
            _local(value).zero_()
        else:
            state[key] = type(value)()


def first_difference(expected: State, actual: State) -> str | None:
    """The path of the first leaf that differs, or None where both states are equal."""
    found = dict(leaves(actual))
    for path, value in leaves(expected):
        if path not in found:
            return path
        other = found[path]
        if isinstance(value, torch.Tensor):
            if not isinstance(other, torch.Tensor) or not torch.equal(_local(value), _local(other)):
                return path
        elif value != other:
            return path
    return None
