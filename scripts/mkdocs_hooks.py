"""Puts the pages of the repository's root on the site, and adapts the links.

README.md becomes project/README.md, and likewise the other pages in the root. Links to and from
these pages are adapted. A link to a source directory becomes text. A link whose text is a file
name, as in "see loading.md", shows the title of the page.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ABOVE = [path.name for path in sorted(ROOT.glob("*.md"))]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")
IMAGE = re.compile(r"(!\[[^\]]*\]\()docs/")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in ABOVE:
        files.append(
            File.generated(config, f"project/{name}", content=(ROOT / name).read_text("utf-8"))
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    is_above = page.file.src_uri.startswith("project/")

    def moved(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = (ROOT if is_above else ROOT / "docs") / target.partition("#")[0]
        if path.is_dir():
            return text
        if text in (target, path.name) and path.suffix == ".md":
            text = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        if is_above and target.startswith("docs/"):
            target = target.replace("docs/", "../", 1)
        elif path.parent.resolve() == ROOT and path.name in ABOVE and not is_above:
            target = target.replace("../", "project/", 1)
        return f"[{text}]({target})"

    markdown = LINK.sub(moved, markdown)
    return IMAGE.sub(r"\1../", markdown) if is_above else markdown
