"""The documentation site builds without a warning, and its reference has every public name."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests import manager_options, promises
from tests.browser import Browser, find_chromium, open_browser
from tests.snippets import snippets_of

pytestmark = pytest.mark.full

REPOSITORY = Path(__file__).parents[3]

PAGES = {
    "torch_ckpt": "torch_ckpt",
    "torch_ckpt.multihost": "multihost",
    "torch_ckpt.training": "training",
    "torch_ckpt.megatron": "megatron",
    "torch_ckpt.nvrx": "nvrx",
    "torch_ckpt.integrations.transformers": "integrations",
    "torch_ckpt.integrations.lightning": "integrations",
    "torch_ckpt.integrations.torchtitan": "integrations",
}


@pytest.fixture(params=PAGES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    """Module with public names."""
    return pytest.importorskip(request.param, exc_type=ModuleNotFoundError)


def public_names(module: ModuleType) -> list[str]:
    return [name for name in module.__all__ if name != "__version__"]


LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site once. A warning fails the build."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}: pip install --group docs")
    site = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=REPOSITORY,
        # No proxy listens at this address: building must use no network.
        env={**os.environ, "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return site


def test_the_reference_has_every_public_name(site: Path, module: ModuleType) -> None:
    title = module.__name__
    page = (site / "reference" / f"{PAGES[title]}.html").read_text()
    missing = [name for name in public_names(module) if f'id="{title}.{name}"' not in page]
    assert not missing, f"{title}: these have no docstring, or no page: {missing}"


def test_docstrings_show_no_sphinx_roles(site: Path) -> None:
    pages = [page.read_text() for page in (site / "reference").glob("*.html")]
    assert not re.search(r":(func|class|meth|mod|data|attr):", "".join(pages))


def test_the_site_loads_nothing_from_another_server(site: Path) -> None:
    asked = re.compile(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="https?://[^"]*"')
    found = {asking for page in site.rglob("*.html") for asking in asked.findall(page.read_text())}
    assert not found


#: The facts of a page: anchors, links, elements wider than a phone, and unparsed markup.
_FACTS = """(() => {
    const width = document.documentElement.clientWidth;
    const scrolls = (node) => {
        for (; node; node = node.parentElement)
            if (["auto", "scroll"].includes(getComputedStyle(node).overflowX)) return true;
        return false;
    };
    const content = [...document.querySelectorAll(".md-content *, .md-header *")];
    const text = document.querySelector(".md-content").innerText;
    return {
        anchors: [...document.querySelectorAll("[id]")].map((node) => node.id),
        links: [...document.links].map((link) => link.href),
        wide: content.filter((node) => node.getBoundingClientRect().right > width + 1)
            .filter((node) => !scrolls(node.parentElement)).map((node) => node.outerHTML),
        markup: text.match(/={5,}|^\\.\\. .*|.*::$/gm) || [],
    };
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium: apt install chromium")
    with open_browser(program, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def shown(site: Path, browser: Browser) -> dict[str, dict[str, list[str]]]:
    """Returns the facts of each page at the width of a phone, by URL."""
    browser.set_width(390)
    found = {}
    for page in site.rglob("*.html"):
        browser.open(page)
        found[page.as_uri()] = browser.evaluate(_FACTS)
    return found


def test_no_link_of_the_site_is_broken(shown: dict[str, dict[str, list[str]]]) -> None:
    broken = set()
    for page, facts in shown.items():
        if page.endswith("/404.html"):  # Its links begin at the root of a server.
            continue
        for link in facts["links"]:
            target, _, anchor = link.partition("#")
            if target in shown:
                is_found = not anchor or unquote(anchor) in shown[target]["anchors"]
            else:
                is_found = not target.startswith("file:") or (
                    Path(unquote(urlsplit(target).path)).is_file()
                )
            if not is_found:
                broken.add(f"{page}: {link}")
    assert not broken


def test_no_page_is_wider_than_a_phone(shown: dict[str, dict[str, list[str]]]) -> None:
    assert not {page: facts["wide"] for page, facts in shown.items() if facts["wide"]}


def test_no_page_shows_unparsed_markup(shown: dict[str, dict[str, list[str]]]) -> None:
    assert not {page: facts["markup"] for page, facts in shown.items() if facts["markup"]}


#: The lowest contrast of text on its background, by the formula of WCAG 2.
_CONTRAST = """(() => {
    const parse = (color) => {
        const [r, g, b, a] = color.match(/[0-9.]+/g).map(Number);
        return [r, g, b, a === undefined ? 1 : a];
    };
    const over = ([r, g, b, a], [R, G, B]) => [
        r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
    const ground = (node) => node === null ? [255, 255, 255, 1]
        : over(parse(getComputedStyle(node).backgroundColor), ground(node.parentElement));
    const luminance = (color) => color.slice(0, 3).map((part) => part / 255)
        .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const texts = ".md-content :is(p, li, td, th, h1, h2, code, a:not(.headerlink))";
    return Math.min(...[...document.querySelectorAll(texts)].map((node) => {
        const back = ground(node);
        const text = over(parse(getComputedStyle(node).color), back);
        const [low, high] = [luminance(back), luminance(text)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    }));
})()"""


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_the_site_follows_the_color_scheme_with_sufficient_contrast(
    site: Path, browser: Browser, scheme: str, is_dark: bool
) -> None:
    browser.set_color_scheme(scheme)
    for page in ("index.html", "manager.html", "reference/manager.html"):
        browser.open(site / page)
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
        assert (brightness < 128) == is_dark
        assert browser.evaluate(_CONTRAST) >= 4, page


@pytest.mark.parametrize(
    "page", [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")], ids=lambda page: page.name
)
def test_links_of_a_page_into_the_repository_exist(page: Path) -> None:
    broken = [
        target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("page", ["README.md", "docs/durability.md"])
def test_the_table_of_injected_faults_has_the_committed_counts(page: str) -> None:
    counts = json.loads(max(REPOSITORY.glob("benchmarks/results/*-promises.json")).read_text())
    text = (REPOSITORY / page).read_text()
    assert promises.filled(text, counts) == text, "python -m tests.promises fills the table"


def test_the_readme_has_at_most_a_few_screens() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 130


def test_the_table_of_the_managers_options_matches_its_signature() -> None:
    text = manager_options.PAGE.read_text()
    assert manager_options.filled(text) == text, "python -m tests.manager_options writes it anew"


#: A table that a script fills, or that states when and on which machine it was measured.
TABLES = re.compile(r"<!-- [\w :-]+begin -->.*?<!-- [\w :-]+end -->|^\|[^\n]*$", re.M | re.S)

#: Rates, and ratios of speeds.
FIGURE = re.compile(r"\d ?[GM]B/s|\d x\b|\d times (as fast|stock|the seconds)")


@pytest.mark.parametrize(
    "page",
    [REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")],
    ids=lambda page: page.name,
)
def test_prose_quotes_no_figure_that_a_script_would_have_to_update(page: Path) -> None:
    prose = TABLES.sub("", page.read_text())
    assert [line for line in prose.splitlines() if FIGURE.search(line)] == []


def members_without_docstring(name: str, member: Any) -> Iterator[str]:
    """Yields the public name itself, and methods and properties of a class of torch_ckpt."""
    if not inspect.getdoc(member):
        yield name
    if not inspect.isclass(member):
        return
    for base in member.__mro__:
        if not base.__module__.startswith("torch_ckpt"):
            continue
        for part, value in vars(base).items():
            is_method = isinstance(value, property | classmethod | staticmethod | FunctionType)
            if is_method and not part.startswith("_") and not inspect.getdoc(getattr(base, part)):
                yield f"{base.__module__}.{base.__name__}.{part}"


def test_every_public_name_and_method_has_a_docstring(module: ModuleType) -> None:
    missing = {
        without
        for name in public_names(module)
        for without in members_without_docstring(f"{module.__name__}.{name}", getattr(module, name))
    }
    assert not missing


def test_every_public_name_is_in_an_example_of_its_reference(module: ModuleType) -> None:
    page = REPOSITORY / "docs" / "reference" / f"{PAGES[module.__name__]}.md"
    code = "".join(found.code for found in snippets_of(page) if found.language == "python")
    assert not [name for name in module.__all__ if not re.search(rf"\b{name}\b", code)]
