"""A griffe extension: Sphinx's roles in docstrings become code, and links to what has a page."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`~?([\w.]+)`")
# Those whose names have a page of their own.
PACKAGES = ("torch_ckpt.multihost", "torch_ckpt.training", "torch_ckpt.integrations")


class DocstringRoles(griffe.Extension):
    """``:func:`save``` would be shown as it is: Markdown has no roles."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        package = next((of for of in PACKAGES if obj.path.startswith(of)), "torch_ckpt")

        def link(role: re.Match[str]) -> str:
            name = role[1]
            path = name if name.startswith("torch_ckpt.") else f"{package}.{name}"
            return f'<autoref identifier="{path}" optional><code>{name}</code></autoref>'

        obj.docstring.value = ROLE.sub(link, obj.docstring.value)
