"""Records the graphs that torch.compile compiles, and draws FX graphs."""

from __future__ import annotations

import copy
import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from torch_ckpt._base.formatting import some_of
from torch_ckpt.ranks.group import own_rank
from torch_ckpt.training.file_operations import StrPath, put

#: Compiles a graph module with example inputs into a function.
Backend = Callable[..., Callable[..., Any]]

# Keys of node.meta that describe a node's value. GraphRecorder sets the first key, and torch's
# tracers set the others.
_VALUES = ("described", "val", "example_value", "tensor_meta")


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
        recorded = copy.deepcopy(module.graph)
        for node in recorded.nodes:
            # Drop all other metadata, which refers to the inputs and would keep them alive.
            node.meta = {"described": _describe_value(node)}
        self.graphs.append(recorded)
        backend: Any = torch._dynamo.lookup_backend(self._backend)
        if self._backend == "inductor":
            # torch.compile interprets mode and options in an object of this class.
            mode, choices = options.pop("mode", None), options.pop("options", None)
            backend = torch._TorchCompileInductorWrapper(mode, choices, None, **options)
            options = {}
        compiled: Callable[..., Any] = backend(module, example_inputs, **options)
        return compiled


def save_graph(graph: Graph | GraphModule, path: StrPath) -> None:
    """Draws a graph and saves the drawing on rank 0; does nothing on other ranks.

    Args:
        graph: an FX graph, such as one recorded by :class:`GraphRecorder`, ``program.graph_module``
            from ``torch.export``, or ``make_fx(step)(batch)``.
        path: a local path or a URL; its directory is created if necessary. The suffix ".svg" saves
            a drawing and requires Graphviz's program ``dot``, which takes minutes for many
            thousands of nodes. The suffix ".dot" saves Graphviz source without running ``dot``.

    Raises:
        ValueError: the path ends in neither ".svg" nor ".dot".
        RuntimeError: ``dot`` is not installed, or failed.
        OSError: the file cannot be written.

    Example::

        training.save_graph(torch.export.export(model, (batch,)).graph_module, "run/model.dot")
    """
    suffix = Path(path).suffix
    if suffix not in (".svg", ".dot"):
        raise ValueError(f"save_graph: the path must end in .svg or .dot, got {path}")
    if own_rank() != 0:
        return
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-graph-") as directory:
        source, drawing = Path(directory, "graph.dot"), Path(directory, "graph.svg")
        source.write_text(dot_source(graph), encoding="utf-8")
        if suffix == ".svg":
            command = ["dot", "-Tsvg", "-o", str(drawing), str(source)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except FileNotFoundError as error:
                raise RuntimeError(
                    f"save_graph: {path} requires Graphviz's program dot, which is not on the "
                    "PATH. Install it (apt-get install graphviz, conda install graphviz), or save "
                    "Graphviz source to a path that ends in .dot"
                ) from error
            except subprocess.CalledProcessError as error:
                raise RuntimeError(
                    f"save_graph: dot failed to draw {path} with exit code {error.returncode}: "
                    f"{error.stderr.strip()}"
                ) from error
        put(drawing if suffix == ".svg" else source, path)


def dot_source(graph: Graph | GraphModule) -> str:
    """Returns Graphviz source with a box for each node and an edge for each input of a node.

    torch's FxGraphDrawer shows no shapes of the graphs of torch.compile, and Graphviz cannot draw
    its labels of calls with "->" in an argument, such as einsum's.
    """
    lines = ["digraph {", 'node [shape=box, style=rounded, fontname="monospace"];']
    for node in (graph.graph if isinstance(graph, GraphModule) else graph).nodes:
        label = [node.name, _describe_value(node)]
        if node.op not in ("placeholder", "output"):
            label.insert(1, getattr(node.target, "__name__", str(node.target)))
        # Graphviz has the escapes of JSON.
        text = json.dumps("\n".join(filter(None, label)), ensure_ascii=False)
        lines.append(f'"{node.name}" [label={text}];')
        lines += [f'"{source.name}" -> "{node.name}";' for source in node.all_input_nodes]
    return "\n".join([*lines, "}", ""])


def _describe_value(node: Node) -> str:
    """Returns the dtypes and shapes of the tensors in a node's value."""
    value = next((node.meta[key] for key in _VALUES if key in node.meta), "")
    if isinstance(value, str):
        return value
    # TensorMetadata is a tuple.
    leaves = tree_leaves(value, is_leaf=lambda leaf: hasattr(leaf, "dtype"))
    tensors = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
    shown = [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in tensors]
    return some_of(shown, 4)
