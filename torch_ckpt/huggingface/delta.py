"""Applies deltas, which change one version of a model to another.

csrc/format/delta.h describes the file, and csrc/engine/delta.h how it is applied.
:func:`torch_ckpt.publish` writes deltas.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.system import refuse_url
from torch_ckpt.checkpoint.directory import OpenDirectory, share_or_warn
from torch_ckpt.checkpoint.marker import MARKER_NAME, STEP_NAME
from torch_ckpt.checkpoint.publishing import split

StrPath = str | os.PathLike[str]


def apply_delta(
    delta: StrPath, target: Mapping[str, Any] | StrPath, out: StrPath | None = None
) -> None:
    """Changes one version of a model to the next, with a delta that :func:`torch_ckpt.publish` has
    written.

    A delta applies only to the version from which it was made, its base. All values of the target
    are compared with the checksums of the base, and the delta is checked. If a check fails, the
    target is left as it was.

    Args:
        delta: path of the delta, or of the directory of the version that contains it. The delta is
            read into memory completely.
        target: either a state dict, whose tensors are changed in place, or the directory of the
            base, which must have its ``torch_ckpt.checksums``. The state dict must contain each
            tensor of the version, under its name in the files; other values in it stay as they are.
            Its DTensors must not be sharded. The directory is replaced completely or not at all. A
            version beneath a root is never replaced; pass ``out``.
        out: if the target is a directory, write the new version to this directory instead, and keep
            the target.

    Raises:
        CheckpointError: the target is not the base, or a tensor is missing, sharded, or of another
            dtype or shape; the message names the tensor.
        Corrupt: the delta is damaged, or a file of the base has another header than was saved.
        ValueError: a path is a URL; tensors share memory and the delta changes them in different
            ways; ``out`` was passed with a state dict; or the directory is a version beneath a
            root, and ``out`` is None.
        FileExistsError: the directory contains files of other programs, or ``out`` exists.
        OSError, DurabilityUncertain: a system call failed, or the last fsync did.

    Example::

        torch_ckpt.apply_delta("policy/0000000012/torch_ckpt.delta", model.state_dict())
        torch_ckpt.apply_delta("policy/0000000012/torch_ckpt.delta", "weights/")
    """
    for given in (delta, target, out):
        refuse_url(given)
    path = os.fspath(delta)
    if os.path.isdir(path):
        path = os.path.join(path, _core.DELTA_NAME)
    directory, name = split(path)
    with closing(OpenDirectory(directory)) as opened:
        read = _core.Delta(opened, name)
    if not isinstance(target, Mapping):
        _apply_to_directory(read, os.fspath(target), out)
        return
    if out is not None:
        raise ValueError("out is for directories; a state dict is changed in place")
    from torch_ckpt.huggingface.delta_tensors import apply_to_tensors

    apply_to_tensors(read, target)


def _apply_to_directory(delta: _core.Delta, path: str, out: StrPath | None) -> None:
    parent, name = split(path if out is None else os.fspath(out))
    if out is None and STEP_NAME.match(name) and os.path.lexists(os.path.join(path, MARKER_NAME)):
        raise ValueError(
            f"{path} is a published version, which must not change; pass another "
            "directory as out (--out)"
        )
    if out is not None:
        if os.path.lexists(out):
            raise FileExistsError(errno.EEXIST, "already exists; choose another directory", out)
        _core.make_directories(parent)
    with closing(OpenDirectory(parent)) as opened, closing(OpenDirectory(path)) as base:
        share_or_warn(base)
        save = _core.ModelSave(opened, name, out is None, [])
        try:
            with closing(opened.open_directory(save.temporary)) as to:
                delta.write_files(base, to)
            save.complete_version(delta, True)
        except BaseException:
            save.discard()
            raise
        # The exclusive lock is needed to remove the former directory.
        base.close()
        save.publish(True)
