"""Publishes the target of a conversion: a file or a directory of safetensors files.

Files are published by checkpoint/publishing.py. A directory is filled under a temporary name and
then renamed. A directory that it replaces is first renamed to another temporary name and later
removed. If another process added files to the replaced directory, the replaced directory is kept,
and a warning gives its path.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

from torch_ckpt import _core
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint import publishing
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.publishing import require_absent, split, told_of_durability
from torch_ckpt.errors import DurabilityUncertain

_MODEL_FILE = re.compile(
    r"^model(-\d{5,}-of-\d{5,})?\.safetensors$|^model\.safetensors\.index\.json$|^config\.json$"
)

_ADVICE = ". Convert again with overwrite=True (--overwrite)"


published_file = partial(publishing.published_file, advice=_ADVICE)


@contextmanager
def published_directory(target: str, overwrite: bool) -> Iterator[str]:
    """Creates a directory that is published when the block ends; yields its temporary path.

    Raises:
        FileExistsError: the target exists and ``overwrite`` is False, or the target contains files
            that do not belong to a safetensors model.
        OSError: a system call failed.
        DurabilityUncertain: the directory is complete, but may be lost in a power failure.
    """
    _require_replaceable(target, overwrite)
    directory, name = split(target)
    temporary, former = publishing.temporary_name(name), publishing.temporary_name(name)
    path = os.path.join(directory, temporary)
    with closing(OpenDirectory(directory)) as opened:
        os.mkdir(path)
        try:
            yield path
            with closing(OpenDirectory(path)) as written:
                written.sync()
                _require_replaceable(target, overwrite)
                aside = former if overwrite and os.path.lexists(target) else None
                with told_of_durability(target, _ADVICE), _explain_concurrent_creation(target):
                    _core.publish(opened, temporary, name, aside, renamed=written)
        except DurabilityUncertain:
            # The rename may still take effect, so keep the files.
            raise
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    if aside is not None:
        _remove_former(os.path.join(directory, aside), target)


@contextmanager
def _explain_concurrent_creation(target: str) -> Iterator[None]:
    # A rename can replace only an empty directory, so it fails if another process made the target.
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise FileExistsError(
            errno.EEXIST,
            "another process has created the target during the conversion; it was not replaced",
            target,
        ) from error


def _remove_former(path: str, target: str) -> None:
    """Removes the replaced directory, unless it contains files that do not belong to a model."""
    try:
        if os.path.islink(path):
            # Remove only the link, not the directory that it points to.
            os.unlink(path)
            return
        names = os.listdir(path)
        others = [name for name in names if not _is_model_file(path, name)]
        if others:
            raise FileExistsError(
                errno.EEXIST, f"another process has added files ({others[0]})", path
            )
        for name in names:
            os.unlink(os.path.join(path, name))
        os.rmdir(path)
    except OSError as error:
        warn(f"{target} was replaced, but its former contents are kept in {path}: {error}")


def _is_model_file(directory: str, name: str) -> bool:
    mode = os.lstat(os.path.join(directory, name)).st_mode
    return _MODEL_FILE.match(name) is not None and not stat.S_ISDIR(mode)


def _require_replaceable(target: str, overwrite: bool) -> None:
    """Raises FileExistsError if the target exists and must not be replaced."""
    if not os.path.isdir(target):
        require_absent(target, overwrite=False)
        return
    others = [name for name in os.listdir(target) if not _MODEL_FILE.match(name)]
    if others:
        raise FileExistsError(
            errno.EEXIST,
            f"the directory contains other files ({others[0]}) and was not replaced. Choose "
            "another target",
            target,
        )
    if os.listdir(target):
        require_absent(target, overwrite)
