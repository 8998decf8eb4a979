"""What a conversion publishes: a file, or a directory of files of safetensors.

They appear as checkpoint/publishing.py says. The files of a directory lie in one of a temporary
name, which is renamed; a directory that is replaced gets a temporary name, too, until it is
removed. What somebody has put into that one meanwhile stays, and a warning says where.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import BinaryIO

from torch_ckpt import _core
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint import publishing
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.publishing import require_absent, split, told_of_durability
from torch_ckpt.errors import DurabilityUncertain

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
                aside = former if overwrite and os.path.lexists(target) else None
                with told_of_durability(target, _ADVICE), _told_of_others(target):
                    _core.publish(opened, temporary, name, aside, renamed=written)
        except DurabilityUncertain:
            # The rename may yet be carried out.
            raise
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    if aside is not None:
        _remove_former(os.path.join(directory, aside), target)


@contextmanager
def _told_of_others(target: str) -> Iterator[None]:
    # A rename replaces no directory but an empty one.
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise FileExistsError(
            errno.EEXIST, "somebody has made it meanwhile; it stays", target
        ) from error


def _remove_former(path: str, target: str) -> None:
    """Removes the directory that was replaced, and nothing in it but files of this kind."""
    try:
        if os.path.islink(path):
            # What it leads to was never ours to replace.
            os.unlink(path)
            return
        names = os.listdir(path)
        others = [name for name in names if not _is_ours(path, name)]
        if others:
            raise FileExistsError(
                errno.EEXIST, f"other files were put into it meanwhile ({others[0]})", path
            )
        for name in names:
            os.unlink(os.path.join(path, name))
        os.rmdir(path)
    except OSError as error:
        warn(f"{target} is replaced, and what it was is kept as {path}: {error}")


def _is_ours(directory: str, name: str) -> bool:
    mode = os.lstat(os.path.join(directory, name)).st_mode
    return _OUR_NAME.match(name) is not None and not stat.S_ISDIR(mode)


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
