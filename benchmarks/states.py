"""The states to save and load: a training state of a decoder, and many small tensors.

If a state is sharded over ranks, its functions work on this rank's parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

State = dict[str, Any]

# Parameters of a decoder outside its layers (two embeddings, head, final norm) and per layer.
_OUTER_PARAMETERS = 4
_PARAMETERS_PER_LAYER = 6
_FLOAT_BYTES = 4
_COPIES_OF_A_PARAMETER = 3  # the parameter and its two Adam moments
# Remainders modulo 24 of numbers of rows that 2, 3, 4 or 8 ranks cannot share evenly.
_PERIOD = 24
_REMAINDERS = (1, 5, 7, 11, 13, 17, 19, 23)
SMALLEST_TENSOR_COUNT = _COPIES_OF_A_PARAMETER * (_OUTER_PARAMETERS + _PARAMETERS_PER_LAYER)


def _decoder_shapes(parameter_bytes: int, parameter_count: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a decoder of `parameter_count` fp32 parameters in `parameter_bytes`.

    The proportions are those of a small language model. Each of the two vocabulary matrices has 28
    rows per unit of width (32,000 rows at a width of 1,140, which follows from 2 GB). A layer has
    12 width^2 numbers.
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
    # The vocabulary absorbs the rounding of the width.
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
    """Makes an fp32 model with its Adam state, as a training script would save it.

    The size differs from `total_bytes` by a few rows of the embedding at most. `tensor_count`
    counts parameters and moments, which are on `device`. The state also has Adam's 0-d step
    tensors, on the CPU as in Adam, and a few numbers.
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
    """Makes `count` fp32 tensors of `tensor_bytes` bytes on `device`.

    Each owns its storage, because the stock writer copies every view of a larger storage.
    """
    generator = torch.Generator(device).manual_seed(seed)
    numel = tensor_bytes // _FLOAT_BYTES
    return {
        f"layers.{index}.weight": torch.rand(numel, generator=generator, device=device)
        for index in range(count)
    }


def uneven_state(total_bytes: int, matrices: int, seed: int = 0) -> State:
    """Makes fp32 matrices and their biases, whose rows 2, 3, 4 or 8 ranks cannot share evenly.

    The size differs from `total_bytes` by 24 rows of each matrix at most.
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
    """Copies this rank's rows, divided as by FSDP2."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    rows = tensor.shape[0]
    begin, end = (min(rows, -(-rows // ranks) * bound) for bound in (rank, rank + 1))
    return _as_dtensor(tensor[begin:end].clone(), mesh, tensor)


def _as_dtensor(part: torch.Tensor, mesh: DeviceMesh, whole: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def sharded(state: State, mesh: DeviceMesh) -> State:
    """Returns the state with this rank's rows of every tensor. 0-d tensors are not sharded."""
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
    """Yields every leaf of the nested dictionaries with its dotted path."""
    for key, value in state.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            yield from leaves(value, path)
        else:
            yield path, value


def tensors(state: State) -> list[torch.Tensor]:
    """Returns every tensor of the state, in order."""
    return [_local(value) for _, value in leaves(state) if isinstance(value, torch.Tensor)]


def payload_bytes(state: State) -> int:
    """Returns the bytes of all tensors: a checkpoint's size without headers and metadata."""
    return sum(tensor.nbytes for tensor in tensors(state))


def blank_copy(state: State) -> State:
    """Makes a state of the same structure with zeros, whose memory is already faulted in."""
    blank: State = {}
    for key, value in state.items():
        if isinstance(value, dict):
            blank[key] = blank_copy(value)
        elif isinstance(value, torch.Tensor):
            # torch.zeros would leave large blocks unmapped until they are touched.
            zeros = torch.empty_like(_local(value)).zero_()
            if isinstance(value, DTensor):
                zeros = _as_dtensor(zeros, value.device_mesh, value)
            blank[key] = zeros
        else:
            blank[key] = type(value)()
    return blank


def fill(state: State, values: dict[str, Any], prefix: str = "") -> None:
    """Sets every leaf to the value with its dotted path. Tensors are copied into those present."""
    for key, value in state.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            fill(value, values, path)
        elif isinstance(value, torch.Tensor):
            _local(value).copy_(values[path])
        else:
            state[key] = values[path]


def wipe(state: State) -> None:
    """Sets every leaf to zero in place, so that a check detects a load that did nothing."""
    for key, value in state.items():
        if isinstance(value, dict):
            wipe(value)
        elif isinstance(value, torch.Tensor):
            _local(value).zero_()
        else:
            state[key] = type(value)()


def first_difference(expected: State, actual: State) -> str | None:
    """Returns the path of the first leaf that differs, or None if the states are equal."""
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
