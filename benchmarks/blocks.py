"""Blocks of documents that scripts fill. A block lies between two comments of the document."""

from __future__ import annotations


def replace_block(text: str, begin: str, end: str, content: str) -> str:
    """Replaces everything between the comments ``begin`` and ``end`` in a text by ``content``.

    Raises:
        ValueError: the text has no such block.
    """
    head, found_begin, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the document has no {begin} ... {end}")
    return f"{head}{begin}\n{content.strip()}\n{end}{tail}"
