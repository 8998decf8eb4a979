"""The passages of this repository that people read, and the wording rules that each breaks.

A passage is a docstring, a comment, a message, the name of a test or a paragraph of a document.
``python -m tests.words PATH...`` lists the breaches under these paths, ``--messages`` lists the
messages, ``--sample 100`` draws passages at random. tests/python/project/test_words.py fails if a
passage breaks a rule.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch_ckpt

REPOSITORY = Path(__file__).parents[1]
#: Kinds of passages that users see.
VISIBLE = ("message", "public docstring", "document")
#: Folders whose strings reach users.
PRODUCT = ("torch_ckpt/", "csrc/")


class Passage(NamedTuple):
    file: str
    line: int
    kind: str
    text: str


# --- rules ------------------------------------------------------------------------------------

#: The terms of this field, by the words that stand for them elsewhere.
TERMS = {
    "signs? of life|pulses?": "heartbeat",
    "given up|gives? up|giving up|gave up": "declared dead, timed out",
    "tells?|told|says|said": "reports, sends, message",
    "goes|gone|lets? go|letting go": "is deleted, releases, continues",
    "quiet": "low-priority",
    "undecoded|not decoded": "lazy",
    "whole (?:checkpoint|step|save)s?": "complete",
    "at the call": "snapshot",
    "went back|goes back": "rewound; stale, for steps of an abandoned timeline",
    "harmless": "allow-listed, safe",
    "look(?:s|ed|ing)? whether": "check that",
    "by itself|by themselves|alone|apart(?! from)": "independently, single-process, separate",
    "alike": "shared, identical on several ranks",
    "beside training": "in the background",
    "without a word": "silently",
    "ma(?:de|kes?) real": "materialized",
    "grown(?!:)|growing|shrunk": "zero-filled, truncated",
    "(?<!of )course": "training timeline",
    "stop notices?": "preemption notice",
    "(?:holds?|held|holding) back": "block until staged",
    "(?:comes?|coming|came) late": "straggler",
    "hurry|hurries|hurried": "wake",
    "meetings?(?!:)|meets?": "rendezvous, exchange",
    "is here|are here": "is present on this rank",
}
_ACTORS = r"who|whom|whoever|(?:some|no|any|every)body|someone|anyone"
_OPENING = re.compile(
    r"(?:Of|That|Those|What|Who|Whose|Whether|The same|As(?! above)|By|In turn|Where|Which)\b"
)
_ANYWHERE = re.compile(
    rf"(?i:\b(?:{_ACTORS}|{'|'.join(TERMS)})\b)|(?:^|(?<=[.:;!?] ))Of (?!course)"
)
_WHERE = re.compile(
    r"(\w*)\W+where (?:it|they|there|no|none|nothing|one|a|an|any|some|all|each|both|several"
    r"|neither|that|this|these|only|not|(?:the|its|their) \w+ (?:is|are|was|has|have|does|do|can"
    r"|may|cannot|must|needs|fails|ends))\b",
    re.I,
)
_LOCATIONS = re.compile(
    r"(?:location|offset|position|point|path|file|directory|folder|byte|line|page|table|section"
    r"|machine|system|record|call|code|module|test|memory|device)s?"
    r"|shows?|knows?|sees?|finds?|found|from|to|exactly|lists?",
    re.I,
)


def breaches(passage: Passage) -> list[str]:
    """Lists the words of a passage that break a rule: a docstring's opening, "where" for a
    condition, an actor without a name, a term that this field does not use."""
    # Names in code are not prose.
    text = re.sub(r"(`+)[^`]+\1", "``", passage.text) if passage.kind != "message" else passage.text
    found = [match[0] for match in _ANYWHERE.finditer(text)]
    found += [
        match[0] for match in _WHERE.finditer(f". {text}") if not _LOCATIONS.fullmatch(match[1])
    ]
    if passage.kind.endswith("docstring") and (opening := _OPENING.match(text)):
        found.append(opening[0])
    return found


def advice(word: str) -> str:
    """Returns the word, with the term that replaces it if TERMS has one."""
    matching = (term for pattern, term in TERMS.items() if re.fullmatch(pattern, word, re.I))
    return f"{word} -> {term}" if (term := next(matching, None)) else word


# --- passages ---------------------------------------------------------------------------------


def files(paths: Sequence[str] = ()) -> list[str]:
    """Lists the files with passages under ``paths``, relative to the repository."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return sorted(
        name for name in listed.stdout.split("\n") if re.search(r"\.(py|pyi|h|cpp|c|md)$", name)
    )


def passages(file: str) -> Iterator[Passage]:
    """Yields the passages of one file."""
    text = (REPOSITORY / file).read_text()
    if file.endswith(".md"):
        found = _document(text)
    elif file.endswith((".py", ".pyi")):
        found = _python(text, _public_names())
    else:
        found = _cpp(text, file.endswith(".h"))
    for line, kind, passage in found:
        if kind in VISIBLE and not file.startswith(PRODUCT) and kind != "document":
            kind = kind.removeprefix("public ")
        if (kind != "message" or file.startswith(PRODUCT)) and passage.strip():
            yield Passage(file, line, kind, " ".join(passage.split()))


def _public_names(names: set[str] = set()) -> set[str]:  # noqa: B006  (computed once)
    """Returns the public names of torch_ckpt and of its packages."""
    if not names:
        names.update(torch_ckpt.__all__)
        for path in (REPOSITORY / "torch_ckpt").glob("*/__init__.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                    names.update(ast.literal_eval(node.value))
    return names


def _python(text: str, public: set[str]) -> Iterator[tuple[int, str, str]]:
    tree = ast.parse(text)
    docstrings = set()

    def walk(node: ast.AST, is_public: bool) -> Iterator[tuple[int, str, str]]:
        for child in ast.iter_child_nodes(node):
            visible = is_public
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = child.name
                in_module = isinstance(node, ast.Module)
                visible = name in public if in_module else is_public and name[0] != "_"
                if name.startswith("test_"):
                    yield child.lineno, "test name", name.removeprefix("test_").replace("_", " ")
                yield from docstring(child, "public docstring" if visible else "docstring")
            if isinstance(child, ast.Constant | ast.JoinedStr) and id(child) not in docstrings:
                message = _literal(child)
                if len(message.split()) >= 3:
                    yield child.lineno, "message", message
            else:
                yield from walk(child, visible)

    def docstring(node: ast.AST, kind: str) -> Iterator[tuple[int, str, str]]:
        if found := ast.get_docstring(node):  # type: ignore[arg-type]
            constant = node.body[0].value  # type: ignore[attr-defined]
            docstrings.add(id(constant))
            yield constant.lineno, kind, found

    yield from docstring(tree, "docstring")
    yield from walk(tree, False)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [
        (token.start[0], token.start[1], token.string.lstrip("#:- "))
        for token in tokens
        if token.type == tokenize.COMMENT
    ]
    yield from _blocks(comments)


def _literal(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return "".join(parts)


def _cpp(text: str, is_header: bool) -> Iterator[tuple[int, str, str]]:
    comments = []
    for number, line in enumerate(text.split("\n"), 1):
        # A comment begins behind all strings of its line.
        if match := re.match(
            r'((?:[^"/\']|"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)+\'|/(?!/)|\')*)//', line
        ):
            comments.append((number, match.end() - 2, line[match.end() :].strip("/- ")))
        if match := re.match(r"(?:TYPED_)?TEST(?:_[FP])?\(\w+, *(\w+)", line):
            words = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", match[1])
            yield number, "test name", words.replace("_", " ").lower()
    yield from _blocks(comments, "docstring" if is_header else "comment")
    code = re.sub(r"(?m)^\s*(//|#).*$", "", text)
    for match in re.finditer(r'(?:"(?:[^"\\\n]|\\.)*"[\s+]*)+', code):
        message = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', match[0]))
        if len(message.split()) >= 3:
            where = text.find(match[0].split("\n")[0])
            yield text[: max(where, 0)].count("\n") + 1, "message", message


def _blocks(
    comments: list[tuple[int, int, str]], kind: str = "comment"
) -> Iterator[tuple[int, str, str]]:
    """Joins comments of consecutive lines and one column into one passage."""
    block: list[tuple[int, int, str]] = []
    for comment in [*comments, (0, 0, "")]:
        if block and (comment[0] != block[-1][0] + 1 or comment[1] != block[0][1]):
            yield block[0][0], kind, " ".join(text for _, _, text in block)
            block = []
        block.append(comment)


def _document(text: str) -> Iterator[tuple[int, str, str]]:
    prose = re.sub(r"(?ms)^( *)```.*?^\1```$", lambda code: "\n" * code[0].count("\n"), text)
    for match in re.finditer(r"(?:.+\n?)+", prose):
        yield prose[: match.start()].count("\n") + 1, "document", match[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--kind", help="list these passages only, as in `--kind 'test name'`")
    parser.add_argument("--messages", action="store_true", help="list all messages")
    parser.add_argument("--sample", type=int, metavar="N", help="draw N passages")
    parser.add_argument("--seed", type=int, default=3, help="of --sample")
    parser.add_argument("--visible", action="store_true", help="what users see")
    options = parser.parse_args()
    chosen = [
        passage
        for file in files(options.paths)
        for passage in passages(file)
        if not (options.messages and passage.kind != "message")
        and not (options.kind and passage.kind != options.kind)
        and not (options.visible and passage.kind not in VISIBLE)
    ]
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    shows_all = options.messages or options.sample
    for passage in chosen:
        found = breaches(passage)
        if shows_all or found:
            marks = f" [{'; '.join(map(advice, found))}]" if found else ""
            print(f"{passage.file}:{passage.line}: {passage.kind}{marks}: {passage.text}")
    if shows_all:
        print(f"{len(chosen)} passages", file=sys.stderr)


if __name__ == "__main__":
    main()
