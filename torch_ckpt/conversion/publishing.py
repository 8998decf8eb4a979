"""What a conversion publishes: a file, or a directory of files of safetensors.

They appear as checkpoint/publishing.py says. The files of a directory lie in one of a temporary
name, which is renamed; a directory that is replaced gets a temporary name, too, until it is
removed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import BinaryIO

from torch_ckpt import _C
from torch_ckpt.checkpoint import publishing
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.publishing import require_absent, split, told_of_durability

_OUR_NAME = re.compile(
    r"^model(-\d{5,}-of-\d{5,})?\.safetensors$|^model\.safetensors\.index\.json$|^config\.json$"
)

_ADVICE = "; convert again with overwrite=True (--overwrite)"


def published_file(target: str, overwrite: bool) -> AbstractContextManager[BinaryIO]:
    """See :func:`torch_ckpt.checkpoint.publishing.published_file`."""
    return publishing.published_file(target, overwrite=overwrite, advice=_ADVICE)


@contextmanager
def published_directory(target: str, overwrite: bool) -> Iterator[str]:
    """The same with a directory. One that is replaced may hold nothing but files of this kind."""
    _require_ours(target, overwrite)
    directory, name = split(target)
    temporary, former = publishing.temporary_name(name), publishing.temporary_name(name)
    path = os.path.join(directory, temporary)
    with closing(OpenDirectory(directory)) as opened:
        os.mkdir(path)
        try:
            yield path
            with closing(OpenDirectory(path)) as written:
                written.sync()
                _require_ours(target, overwrite)
                with told_of_durability(target, _ADVICE):
                    _C.publish(opened, temporary, name, former, renamed=written)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    shutil.rmtree(os.path.join(directory, former), ignore_errors=True)


def _require_ours(target: str, overwrite: bool) -> None:
    if not os.path.isdir(target):
        require_absent(target, overwrite=False)
        return
    others = [name for name in os.listdir(target) if not _OUR_NAME.match(name)]
    if others:
        raise FileExistsError(
            errno.EEXIST, f"is a directory with other files ({others[0]}); they stay", target
        )
    if os.listdir(target):
        require_absent(target, overwrite)
