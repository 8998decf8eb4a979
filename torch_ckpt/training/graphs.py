"""Pictures of what torch.compile compiles."""

from __future__ import annotations

import copy
import importlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import _get_qualified_name

from torch_ckpt.ranks.meeting import own_rank
from torch_ckpt.training.files import StrPath, put

#: What compiles a graph: of a graph module and example inputs it makes a function.
Backend = Callable[..., Callable[..., Any]]

# Where torch's tracers keep what a node computes, the most exact first.
_VALUES = ("val", "example_value", "tensor_meta")

_COLOURS = {
    "placeholder": "#d5e8d4",
    "get_attr": "#fff2cc",
    "call_module": "#e1d5e7",
    "output": "#f8cecc",
}

# A tuple's other elements would make the picture wider than they are of use.
_MOST_ELEMENTS = 4

# Names may be as long as a path through a model.
_MOST_CHARACTERS = 80


class GraphRecorder:
    """A backend of ``torch.compile`` that keeps its graphs and has another backend compile them.

        recorder = GraphRecorder()
        step = torch.compile(step, backend=recorder)
        step(batch)
        save_graph(recorder.graphs[0], "gs://bucket/run/step.svg")

    Args:
        backend: the one that compiles, by name or itself. Arguments ``mode`` and ``options`` of
            ``torch.compile`` reach it.

    Attributes:
        graphs: one for each compilation, in their order: a step with graph breaks has several, and
            recompiling it adds one. They hold no tensors.
    """

    def __init__(self, backend: str | Backend = "inductor") -> None:
        self.graphs: list[Graph] = []
        self._backend = backend

    def __call__(
        self, module: GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        # Before compiling, which changes the graph.
        self.graphs.append(_without_tensors(module.graph))
        return self._compiler(options)(module, example_inputs, **options)

    def _compiler(self, options: dict[str, Any]) -> Backend:
        if not isinstance(self._backend, str):
            return self._backend
        if self._backend == "inductor" and options:
            _as_patches(options)
        lookup: Callable[[str], Backend] = importlib.import_module("torch._dynamo").lookup_backend
        return lookup(self._backend)


def save_graph(
    graph: Graph | GraphModule, path: StrPath, *, timeout_seconds: float | None = None
) -> None:
    """Draws a graph, on rank 0; elsewhere does nothing.

    Args:
        graph: an FX graph, such as one of :class:`GraphRecorder`'s, ``torch.export``'s
            ``program.graph_module`` or ``make_fx(step)(batch)``.
        path: where to, a local path or a URL, as of :func:`mkdir`; its directory is made. It ends
            in ".svg", which takes Graphviz's program ``dot``, or in ".dot" for its source, which
            takes nothing.
        timeout_seconds: for ``dot``, which takes minutes for many thousand nodes.

    Raises:
        ValueError: the path ends otherwise.
        RuntimeError: ``dot`` is not installed, or fails.
        TimeoutError: ``dot`` took longer than it may.
        OSError: the file could not be written.
    """
    suffix = Path(path).suffix
    if suffix not in (".svg", ".dot"):
        raise ValueError(f"save_graph: {path} must end in .svg or .dot")
    if own_rank() != 0:
        return
    dot = shutil.which("dot") if suffix == ".svg" else None
    if suffix == ".svg" and dot is None:
        raise RuntimeError(
            f"save_graph: {path} takes Graphviz's program dot, and there is none on the PATH: "
            "install it (apt-get install graphviz, dnf install graphviz, conda install graphviz), "
            "or save the graph's source to a path that ends in .dot"
        )
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-graph-") as directory:
        local = Path(directory, "graph.dot")
        local.write_text(dot_source(graph), encoding="utf-8")
        if dot is not None:
            local = _drawn(dot, local, path, timeout_seconds)
        put(local, path)


def dot_source(graph: Graph | GraphModule) -> str:
    """A graph in Graphviz's language: a box for each node, an edge for each of its inputs."""
    if isinstance(graph, GraphModule):
        graph = graph.graph
    ids = {node: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = [
        "digraph {",
        'node [shape=box, style="rounded,filled", fillcolor=white, fontname="monospace"];',
    ]
    for node, identifier in ids.items():
        label = "\\n".join(_escaped(line) for line in _label(node))
        colour = _COLOURS.get(node.op)
        fill = f', fillcolor="{colour}"' if colour else ""
        lines.append(f'{identifier} [label="{label}"{fill}];')
        lines += [f"{ids[source]} -> {identifier};" for source in node.all_input_nodes]
    return "\n".join([*lines, "}", ""])


def _drawn(dot: str, source: Path, path: StrPath, timeout_seconds: float | None) -> Path:
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
            f"save_graph: dot has not drawn {path} within {timeout_seconds} s: allow it more, or "
            "save the graph's source to a path that ends in .dot"
        ) from error
    if result.returncode != 0:
        raise RuntimeError(
            f"save_graph: dot did not draw {path}: exit code {result.returncode}: "
            f"{result.stderr.strip()}"
        )
    return target


def _as_patches(options: dict[str, Any]) -> None:
    """Replaces torch.compile's arguments by the one that inductor takes them in."""
    inductor = importlib.import_module("torch._inductor")
    patches = dict(inductor.list_mode_options(options.pop("mode", None) or "default"))
    given = options.pop("options", None) or {}
    patches.update({name.replace("-", "_"): value for name, value in given.items()})
    options["config_patches"] = patches


def _without_tensors(graph: Graph) -> Graph:
    kept = copy.deepcopy(graph)
    for node in kept.nodes:
        # The rest leads to the inputs themselves, and would keep them alive.
        node.meta = {"described": _described(node)}
    return kept


def _described(node: Node) -> str:
    """The dtype and shape of what a node computes."""
    if "described" in node.meta:
        return str(node.meta["described"])
    return next((_text(node.meta[key]) for key in _VALUES if key in node.meta), "")


def _text(value: Any) -> str:
    # TensorMetadata, too, is a tuple.
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        shown = [_text(element) for element in value[:_MOST_ELEMENTS]]
        return ", ".join(shown + (["..."] if len(value) > _MOST_ELEMENTS else []))
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return str(value)
    return ""


def _label(node: Node) -> list[str]:
    lines = [node.name]
    if node.op not in ("placeholder", "output"):
        lines.append(_called(node.target))
    lines.append(_described(node))
    return [line[:_MOST_CHARACTERS] for line in lines if line]


def _called(target: Any) -> str:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    try:
        return str(_get_qualified_name(target)).removeprefix("_")  # of _operator
    except (AttributeError, RuntimeError):  # torch does not find what it is a part of
        return str(getattr(target, "__qualname__", target))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
