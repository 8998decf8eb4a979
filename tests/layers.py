"""Checks which packages of torch_ckpt and folders of csrc use which others, against the allowed
order.

``python -m tests.layers`` updates the picture in docs/design.md.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.blocks import replace_block

REPOSITORY = Path(__file__).parents[1]
DESIGN = REPOSITORY / "docs" / "design.md"
BEGIN, END = "<!-- layers: begin -->", "<!-- layers: end -->"

#: Packages and modules of torch_ckpt, from the top down. Each may use only modules of lower layers.
#: "" is torch_ckpt itself, which has the public names.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("", "__main__", "integrations"),
    ("cli", "training"),
    ("manager",),
    ("api", "conversion", "nvrx", "publication"),
    ("huggingface", "megatron", "multihost", "steps"),
    ("loading", "saving"),
    ("events", "inspection", "state"),
    ("checkpoint", "ranks"),
    ("options", "stores"),
    ("_base", "errors", "intervals"),
)

#: Folders of csrc and the files beside them, from the top down.
CSRC_LAYERS: tuple[tuple[str, ...], ...] = (
    ("torch_python",),
    ("torch",),
    ("python",),
    ("directory", "engine"),
    ("staging",),
    ("planning",),
    ("index",),
    ("format", "os"),
    ("interrupt_check",),
    ("checked_math", "error", "file_name", "seeded_hash", "utf8"),
)

#: The extension modules of torch_ckpt.
EXTENSIONS = ("_C", "_core")

Graph = dict[str, set[str]]


def imports(package: Path) -> Graph:
    """Maps each module of a package to the modules of the package that it imports. Includes imports
    within functions and by ``import_module`` with a string."""
    root = package.name
    files = {_module_of(path, package.parent): path for path in package.rglob("*.py")}
    extensions = tuple(f"{root}.{name}" for name in EXTENSIONS)
    graph: Graph = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text())
        within = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found = {_file_of(used, files) for used in _used(tree, within)}
        # Extension modules and their contents are left out.
        graph[name] = {
            used
            for used in found - {name}
            if used.partition(".")[0] == root and not used.startswith(extensions)
        }
    return graph


def _module_of(path: Path, above: Path) -> str:
    return ".".join(path.relative_to(above).with_suffix("").parts).removesuffix(".__init__")


def _file_of(used: str, files: Mapping[str, Path]) -> str:
    """Returns the module for a dotted name, which may name a module or a name within one."""
    parent = used.rpartition(".")[0]
    name = used.rpartition(".")[2]
    return parent if used not in files and parent in files and name not in EXTENSIONS else used


def _used(tree: ast.AST, within: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = within.split(".")[: -(node.level - 1) or None] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            called = getattr(function, "attr", getattr(function, "id", None))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def includes(folder: Path) -> Graph:
    """Maps each source or header of csrc, without suffix, to those that it includes."""
    graph: Graph = defaultdict(set)
    for path in (*folder.rglob("*.h"), *folder.rglob("*.cpp")):
        name = str(path.relative_to(folder).with_suffix(""))
        text = path.read_text()
        found = re.findall(r'^ *#include "([^"]+)"', text, re.M)
        graph[name] |= {str(Path(other).with_suffix("")) for other in found} - {name}
    return dict(graph)


def part_of(module: str) -> str:
    """Returns the package or folder of a module, or the module itself if it is in none."""
    names = module.removeprefix("torch_ckpt.").replace("/", ".").split(".")
    return "" if names[0] == "torch_ckpt" else names[0]


def upward_uses(graph: Graph, layers: tuple[tuple[str, ...], ...]) -> list[str]:
    """Lists uses of a part that is not on a lower layer. Uses within one part are allowed."""
    layer_of = {part: layer for layer, parts in enumerate(layers) for part in parts}
    return [
        f"{name} uses {used}"
        for name, all_used in sorted(graph.items())
        for used in sorted(all_used)
        if part_of(name) != part_of(used) and layer_of[part_of(used)] <= layer_of[part_of(name)]
    ]


def cycles(graph: Graph) -> list[str]:
    """Lists the import cycles."""
    found: list[str] = []
    ended: set[str] = set()

    def walk(name: str, way: list[str]) -> None:
        if name in way:
            found.append(" -> ".join([*way[way.index(name) :], name]))
        elif name not in ended:
            for used in sorted(graph.get(name, ())):
                walk(used, [*way, name])
            ended.add(name)

    for name in sorted(graph):
        walk(name, [])
    return found


def picture() -> str:
    """Draws the layers from the top down: a sentence for each part, and the parts that it uses."""
    lines = ["```"]
    graph = imports(REPOSITORY / "torch_ckpt")
    for layer in LAYERS:
        for part in layer:
            lines += _lines_of(
                f"torch_ckpt/{part}".rstrip("/"), _sentence(part), _parts(graph, part)
            )
        lines.append("")
    lines.append("csrc")
    graph = includes(REPOSITORY / "csrc")
    for layer in CSRC_LAYERS:
        for part in layer:
            lines += _lines_of(f"csrc/{part}", CSRC[part], _parts(graph, part))
    return "\n".join([*lines, "```", ""])


#: One sentence for each part of csrc.
CSRC = {
    "torch_python": "The extension module _C: bindings that accept or return tensors.",
    "python": "The extension module _core: bindings that parse, release the GIL, call, translate.",
    "torch": "Tensors as sources and targets, and load waves, by LibTorch's C functions.",
    "engine": "File images, the sessions of saves, loads and verifications, results, thread pools.",
    "directory": "Protocols on disk, numbered: commits, leases, deletions, and the steps of a run.",
    "staging": "Sources, copies from host and device, the pool of chunks.",
    "index": "A checkpoint's metadata in arrays, decoded and checked.",
    "format": "File formats: records, pickles, checksum tables, CRC-32.",
    "os": "The only folder with system calls, and the fault points for tests.",
    "planning": "Assignment of data: templates of states, owners, buckets, regions, read units.",
    "checked_math": "The only place that adds or compares offsets from outside.",
    "file_name": "The form that untrusted file names must have.",
    "error": "One code for each defect, and Result<T>.",
    "interrupt_check": "The callback by which a long call finds out that it is interrupted.",
    "seeded_hash": "Seeded hashes for tables with untrusted keys.",
    "utf8": "Checks of texts from outside.",
}


def _lines_of(part: str, sentence: str, used: list[str]) -> list[str]:
    return [f"{part:<26}{sentence}", *([f"{'':<28}uses {', '.join(used)}"] if used else [])]


def _parts(graph: Graph, part: str) -> list[str]:
    used = {
        part_of(other)
        for name, others in graph.items()
        if part_of(name) == part
        for other in others
    }
    return sorted(used - {part, ""})


def _sentence(part: str) -> str:
    """Returns the first sentence of a package's or module's docstring."""
    package = REPOSITORY / "torch_ckpt" / part
    file = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def with_picture(text: str) -> str:
    """Replaces the picture between the marks of a document by the current one."""
    return replace_block(text, BEGIN, END, picture())


if __name__ == "__main__":
    DESIGN.write_text(with_picture(DESIGN.read_text()))
    sys.exit(0)
