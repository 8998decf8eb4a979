"""Records the graphs that torch.compile compiles, and draws FX graphs."""

from __future__ import annotations

import copy
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import _get_qualified_name

from torch_ckpt.ranks.group import own_rank
from torch_ckpt.training.file_operations import StrPath, put

#: Compiles a graph module with example inputs into a function.
Backend = Callable[..., Callable[..., Any]]

# Keys of node.meta under which torch's tracers store a node's value, most precise first.
_VALUES = ("val", "example_value", "tensor_meta")

_COLOURS = {
    "placeholder": "#d5e8d4",
    "get_attr": "#fff2cc",
    "call_module": "#e1d5e7",
    "output": "#f8cecc",
}

# Maximum number of tuple elements shown in a box.
_MAX_ELEMENTS = 4

# Maximum length of a line in a box.
_MAX_CHARACTERS = 80


class GraphRecorder:
    """A ``torch.compile`` backend that records graphs and passes them to another backend.

    Args:
        backend: the backend that compiles the graphs, or the name of a backend. The backend
            receives the ``mode`` and ``options`` arguments of ``torch.compile``.

    Attributes:
        graphs: the compiled graphs in order, one per compilation. A function with graph breaks has
            several graphs, and each recompilation adds another graph. The recorded graphs hold no
            tensors.

    Example::

        recorder = training.GraphRecorder()
        step = torch.compile(step, backend=recorder)
        step(batch)
        training.save_graph(recorder.graphs[0], "gs://bucket/run/step.svg")
    """

    def __init__(self, backend: str | Backend = "inductor") -> None:
        self.graphs: list[Graph] = []
        self._backend = backend

    def __call__(
        self, module: GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        # Copy the graph before compiling modifies it.
        self.graphs.append(_copy_without_tensors(module.graph))
        if not isinstance(self._backend, str):
            return self._backend(module, example_inputs, **options)
        # The objects that torch.compile makes for the name of a backend.
        wrap: Any = partial(torch._TorchCompileWrapper, self._backend)
        if self._backend == "inductor":
            wrap = torch._TorchCompileInductorWrapper
        mode, choices = options.pop("mode", None), options.pop("options", None)
        compiler: Backend = wrap(mode, choices, dynamic=None, **options)
        return compiler(module, example_inputs)


def save_graph(
    graph: Graph | GraphModule, path: StrPath, *, timeout_seconds: float | None = None
) -> None:
    """Draws a graph and saves the drawing on rank 0; does nothing on other ranks.

    Args:
        graph: an FX graph, such as one recorded by :class:`GraphRecorder`, ``program.graph_module``
            from ``torch.export``, or ``make_fx(step)(batch)``.
        path: a local path or a URL, as for :func:`mkdir`. The file's directory is created if
            necessary. The suffix ".svg" saves a drawing and requires Graphviz's program ``dot``.
            The suffix ".dot" saves Graphviz source and does not require ``dot``.
        timeout_seconds: time limit for ``dot``; None means no limit. Drawing a graph with many
            thousands of nodes takes minutes.

    Raises:
        ValueError: the path ends in neither ".svg" nor ".dot".
        RuntimeError: ``dot`` is not installed, or failed.
        TimeoutError: ``dot`` exceeded its time limit.
        OSError: the file cannot be written.

    Example::

        training.save_graph(torch.export.export(model, (batch,)).graph_module, "run/model.dot")
    """
    suffix = Path(path).suffix
    if suffix not in (".svg", ".dot"):
        raise ValueError(f"save_graph: the path must end in .svg or .dot, got {path}")
    if own_rank() != 0:
        return
    dot = shutil.which("dot") if suffix == ".svg" else None
    if suffix == ".svg" and dot is None:
        raise RuntimeError(
            f"save_graph: {path} requires Graphviz's program dot, which is not on the PATH. "
            "Install it (apt-get install graphviz, dnf install graphviz, conda install graphviz), "
            "or save Graphviz source to a path that ends in .dot"
        )
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-graph-") as directory:
        local = Path(directory, "graph.dot")
        local.write_text(dot_source(graph), encoding="utf-8")
        if dot is not None:
            local = _draw(dot, local, path, timeout_seconds)
        put(local, path)


def dot_source(graph: Graph | GraphModule) -> str:
    """Returns Graphviz source with a box for each node and an edge for each input of a node."""
    if isinstance(graph, GraphModule):
        graph = graph.graph
    ids = {node: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = [
        "digraph {",
        'node [shape=box, style="rounded,filled", fillcolor=white, fontname="monospace"];',
    ]
    for node, identifier in ids.items():
        label = "\\n".join(_escape(line) for line in _label_lines(node))
        colour = _COLOURS.get(node.op)
        fill = f', fillcolor="{colour}"' if colour else ""
        lines.append(f'{identifier} [label="{label}"{fill}];')
        lines += [f"{ids[source]} -> {identifier};" for source in node.all_input_nodes]
    return "\n".join([*lines, "}", ""])


def _draw(dot: str, source: Path, path: StrPath, timeout_seconds: float | None) -> Path:
    target = source.with_suffix(".svg")
    try:
        result = subprocess.run(
            [dot, "-Tsvg", "-o", str(target), str(source)],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(
            f"save_graph: dot did not finish {path} within {timeout_seconds} s. Increase "
            "timeout_seconds, or save Graphviz source to a path that ends in .dot"
        ) from error
    if result.returncode != 0:
        raise RuntimeError(
            f"save_graph: dot failed to draw {path} with exit code {result.returncode}: "
            f"{result.stderr.strip()}"
        )
    return target


def _copy_without_tensors(graph: Graph) -> Graph:
    copied = copy.deepcopy(graph)
    for node in copied.nodes:
        # Drop all other metadata, which refers to the inputs and would keep them alive.
        node.meta = {"described": _describe_value(node)}
    return copied


def _describe_value(node: Node) -> str:
    """Returns the dtype and shape of a node's value."""
    if "described" in node.meta:
        return str(node.meta["described"])
    return next((_format_value(node.meta[key]) for key in _VALUES if key in node.meta), "")


def _format_value(value: Any) -> str:
    # Check this first, because TensorMetadata is a tuple.
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        shown = [_format_value(element) for element in value[:_MAX_ELEMENTS]]
        return ", ".join(shown + (["..."] if len(value) > _MAX_ELEMENTS else []))
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return str(value)
    return ""


def _label_lines(node: Node) -> list[str]:
    lines = [node.name]
    if node.op not in ("placeholder", "output"):
        lines.append(_target_name(node.target))
    lines.append(_describe_value(node))
    return [line[:_MAX_CHARACTERS] for line in lines if line]


def _target_name(target: Any) -> str:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    try:
        return str(_get_qualified_name(target)).removeprefix("_")  # "_operator" to "operator"
    except (AttributeError, RuntimeError):  # torch cannot find its module
        return str(getattr(target, "__qualname__", target))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
