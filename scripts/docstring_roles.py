"""A griffe extension that finds the public names, and turns reStructuredText in docstrings into
Markdown.

Roles become code, and links to names that have a page. Literal blocks become Python code.
"""

import re
import textwrap
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`~?([\w.]+)`")
BLOCK = re.compile(r"^(\w.*):: *\n\n((?: {4}.*\n?|\n)+)", re.M)
# Packages with their own page of the reference.
PACKAGES = ("torch_ckpt.multihost", "torch_ckpt.training", "torch_ckpt.integrations")


class DocstringRoles(griffe.Extension):
    """Rewrites each docstring, since Markdown has neither roles nor literal blocks."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        # griffe cannot evaluate the ``__all__`` of torch_ckpt, which has the names of its stub.
        if pkg.exports == []:
            pkg.exports = [name for name, member in pkg.members.items() if not member.runtime]

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        package = next((of for of in PACKAGES if obj.path.startswith(of)), "torch_ckpt")

        def link(role: re.Match[str]) -> str:
            name = role[1]
            path = name if name.startswith("torch_ckpt.") else f"{package}.{name}"
            return f'<autoref identifier="{path}" optional><code>{name}</code></autoref>'

        def fence(block: re.Match[str]) -> str:
            return f"{block[1]}:\n\n```python\n{textwrap.dedent(block[2]).strip()}\n```\n\n"

        obj.docstring.value = ROLE.sub(link, BLOCK.sub(fence, obj.docstring.value))
