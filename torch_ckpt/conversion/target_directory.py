"""Publishes the target of a conversion: a file or a directory of safetensors files.

Files are published by checkpoint/publishing.py, and directories by csrc/directory/model_save.h.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial

from torch_ckpt import _core
from torch_ckpt.checkpoint import publishing
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.publishing import add_durability_advice, require_absent, split

_ADVICE = ". Convert again with overwrite=True (--overwrite)"


published_file = partial(publishing.published_file, advice=_ADVICE)


@contextmanager
def published_directory(
    target: str, overwrite: bool, copied: Iterable[str]
) -> Iterator[tuple[str, _core.ModelSave]]:
    """Creates a directory that is published when the block ends. Yields its temporary path and the
    save that the block must complete.

    Args:
        copied: names of the files in the directory that are not part of the model.

    Raises:
        FileExistsError: the target exists and ``overwrite`` is False, or the target contains files
            that do not belong to a safetensors model.
        OSError: a system call failed.
        DurabilityUncertain: the directory is complete, but may be lost in a power failure.
    """
    if not os.path.isdir(target) or os.listdir(target):
        require_absent(target, overwrite)
    directory, name = split(target)
    with closing(OpenDirectory(directory)) as parent:
        # An empty directory may be replaced.
        save = _core.ModelSave(parent, name, overwrite or os.path.isdir(target), [*copied])
        path = os.path.join(directory, save.temporary)
        try:
            yield path, save
        except BaseException:
            save.discard()
            raise
        with add_durability_advice(target, _ADVICE):
            save.publish(True)
