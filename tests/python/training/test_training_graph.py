"""Pictures of graphs; drawn where Graphviz is installed."""

from __future__ import annotations

import gc
import shutil
import uuid
import weakref
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.fx import Graph, GraphModule

from torch_ckpt.training import GraphRecorder, save_graph
from torch_ckpt.training.graphs import dot_source

SVG = "{http://www.w3.org/2000/svg}"

graphviz = pytest.mark.skipif(not shutil.which("dot"), reason="Graphviz is not installed")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Hides the graphs that other tests have compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w).sum()


def run_step(**options: Any) -> float:
    return torch.compile(step, **options)(torch.ones(2, 3), torch.ones(3, 4)).item()


def compiled_graph() -> Graph:
    recorder = GraphRecorder("eager")
    run_step(backend=recorder)
    [graph] = recorder.graphs
    return graph


def graph_with_target(target: str) -> Graph:
    graph = Graph()
    graph.output(graph.call_method(target, (graph.placeholder("x"),)))
    return graph


def test_a_graph_is_recorded_for_each_compilation() -> None:
    recorder = GraphRecorder("eager")
    compiled = torch.compile(step, backend=recorder, dynamic=False)
    for rows in (2, 2, 5):
        compiled(torch.ones(rows, 3), torch.ones(3, 4))
    assert len(recorder.graphs) == 2


def test_a_step_with_a_graph_break_has_two_graphs() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.cumsum(0)
        torch._dynamo.graph_break()
        return y.cumprod(0)

    recorder = GraphRecorder("eager")
    torch.compile(broken, backend=recorder)(torch.ones(2))
    sources = [dot_source(graph) for graph in recorder.graphs]
    assert ["cumsum" in source for source in sources] == [True, False]
    assert ["cumprod" in source for source in sources] == [False, True]


def test_the_other_backend_compiles() -> None:
    calls: list[str] = []

    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        calls.append("compile")
        return module.forward

    assert run_step(backend=GraphRecorder(backend)) == 24
    assert calls == ["compile"]


def test_inductor_compiles_with_the_mode_and_options_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def compile_fx(module: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        given.append(options)
        return module.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    run_step(backend=GraphRecorder(), mode="reduce-overhead")
    torch._dynamo.reset()
    run_step(backend=GraphRecorder(), options={"max-fusion-size": 8})
    assert given[0]["config_patches"] == torch._inductor.list_mode_options("reduce-overhead")
    assert given[1]["config_patches"] == {"max_fusion_size": 8}


def test_recorded_graphs_keep_no_tensors_alive() -> None:
    recorder = GraphRecorder("eager")
    x, w = torch.ones(2, 3), torch.ones(3, 4)
    torch.compile(step, backend=recorder)(x, w)
    alive = weakref.ref(w)
    del x, w
    torch._dynamo.reset()
    gc.collect()
    assert recorder.graphs
    assert alive() is None


def test_the_source_has_a_box_for_each_node_and_an_edge_for_each_input() -> None:
    source = dot_source(compiled_graph())
    assert source.count("[label=") == 6  # x, w, matmul, relu, sum, output
    assert source.count(" -> ") == 5
    # A box shows the called function and its result.
    assert 'label="l_x_\\nfloat32[2, 3]"' in source
    assert 'label="relu\\nrelu\\nfloat32[2, 4]"' in source


def test_a_call_of_a_function_without_a_torch_name_is_shown() -> None:
    graph = Graph()
    without_source = eval("lambda x: x")
    graph.output(graph.call_function(without_source, (graph.placeholder("x"),)))
    assert "\\n<lambda>" in dot_source(graph)


def test_quotes_and_backslashes_in_labels_are_escaped() -> None:
    source = dot_source(graph_with_target('a"];\\'))
    assert '\\na\\"];\\\\"' in source


def test_a_traced_module_is_drawn_as_its_graph() -> None:
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 4)))
    assert dot_source(module) == dot_source(module.graph)


def test_shapes_of_an_exported_program_are_shown() -> None:
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2, 3),))
    assert "relu.default\\nfloat32[2, 3]" in dot_source(program.graph_module)


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "another file system"])
def test_the_source_is_saved_without_graphviz(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    monkeypatch.setenv("PATH", "")
    graph = compiled_graph()
    path = f"{tmp_path if is_local else f'memory://{uuid.uuid4().hex}'}/made/step.dot"
    save_graph(graph, path)
    file_system, place = fsspec.core.url_to_fs(path)
    assert file_system.cat_file(place).decode() == dot_source(graph)


def test_an_svg_without_graphviz_and_another_suffix_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"step\.svg requires .*apt-get install graphviz"):
        save_graph(Graph(), tmp_path / "step.svg")
    with pytest.raises(ValueError, match=r"must end in \.svg or \.dot, got .*step\.png"):
        save_graph(Graph(), tmp_path / "step.png")


@graphviz
def test_an_svg_has_a_group_for_each_node_and_edge(tmp_path: Path) -> None:
    save_graph(compiled_graph(), tmp_path / "step.svg")
    drawn = ElementTree.parse(tmp_path / "step.svg").getroot()
    groups = [group.get("class") for group in drawn.iter(f"{SVG}g")]
    assert groups.count("node") == 6
    assert groups.count("edge") == 5


@graphviz
def test_an_svg_shows_any_name_unchanged(tmp_path: Path) -> None:
    save_graph(graph_with_target('a"];\\<é&'), tmp_path / "graph.svg")
    texts = [text.text for text in ElementTree.parse(tmp_path / "graph.svg").iter(f"{SVG}text")]
    assert 'a"];\\<é&' in texts


def test_a_failure_of_dot_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho no layout >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"step\.svg with exit code 3: no layout"):
        save_graph(Graph(), tmp_path / "step.svg")
