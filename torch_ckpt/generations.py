"""Which files of a checkpoint's directory belong to what, and which may go.

A directory may hold a committed checkpoint, left-overs of saves that died, and the files of the
save that is under way. Two rules keep them apart, and nothing else in the package removes a data
file:

1. Nothing is removed before the commit. A save whose names might be taken, by whatever is there,
   gets a tag of its own in its names.
2. A file that any metadata in the directory names is never removed. Metadata that cannot be read
   may name any file, so then nothing is.
"""

from __future__ import annotations

import os
import re
import uuid
import warnings
from collections.abc import Iterable

from torch_ckpt import _C
from torch_ckpt.metadata import METADATA_NAME, read_metadata

# "__3_0.distcp", "__3_5f0c19ab_0.distcp": rank, generation tag where there is one, bucket. A
# separation hint may stand before it.
_DATA_FILE = re.compile(r"__(\d+)_(?:[0-9a-f]{8}_)?\d+\.distcp$")
_METADATA_FILE = re.compile(rf"^(?:__(\d+))?{re.escape(METADATA_NAME)}$")
_TEMPORARY = re.compile(rf"^(?:__(\d+))?{re.escape(METADATA_NAME)}\.tmp(?:-[0-9a-f]{{32}})?$")


def metadata_name(rank: int | None) -> str:
    """The metadata's file name; of one rank's own where ranks save without collectives."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


def choose_prefix(directory: str, prefix: str) -> str:
    """The prefix of a save's data files: ``prefix``, tagged where files of this kind are there.

    Args:
        directory: of the checkpoint; it exists.
        prefix: ``__{rank}_``.

    Raises:
        OSError: the directory cannot be listed.
    """
    rank = prefix.strip("_")
    for name in os.listdir(directory):
        data = _DATA_FILE.search(name)
        if _METADATA_FILE.match(name) or (data and data.group(1) == rank):
            return f"{prefix}{uuid.uuid4().hex[:8]}_"
    return prefix


def refuse_hidden_save(directory: str, rank: int | None) -> None:
    """Refuses a save by ranks on their own into a directory with a common checkpoint.

    Loading looks for the common metadata first, so it would go on finding the old checkpoint.

    Raises:
        FileExistsError: there is a common checkpoint.
    """
    common = os.path.join(directory, METADATA_NAME)
    if rank is not None and os.path.lexists(common):
        raise FileExistsError(
            17,
            "a checkpoint of all ranks is here, and a save with use_collectives=False would not "
            "replace it; choose another directory",
            common,
        )


def sweep(directory: str, rank: int | None, used: set[str]) -> None:
    """Removes, after a commit, what no metadata names any more; never raises.

    Args:
        directory: of the checkpoint.
        rank: the rank whose files are looked at, where ranks save on their own. None: those of all
            ranks, and the metadata of single ranks, which the common one has superseded.
        used: the data files that the metadata just committed names.
    """
    try:
        names = os.listdir(directory)
        if rank is None:
            superseded = [n for n in names if (m := _METADATA_FILE.match(n)) and m.group(1)]
            if superseded:
                remove_files(directory, superseded)
                # A power cut must not bring them back after their data files have gone.
                _C.sync_directory(directory)
        unused = []
        for name in names:
            match = _DATA_FILE.search(name) or _TEMPORARY.match(name)
            if match and name not in used and (rank is None or match.group(1) == str(rank)):
                unused.append(name)
        if unused:
            elsewhere = _named_by_others(directory, metadata_name(rank))
            remove_files(directory, [name for name in unused if name not in elsewhere])
    except Exception as error:
        # Nothing that is needed is lost, and the checkpoint is committed.
        warnings.warn(f"unused files are left in {directory}: {error}", stacklevel=2)


def remove_files(directory: str, names: Iterable[str]) -> None:
    """Removes files that are known to be named by no metadata; warns where that fails."""
    for name in names:
        try:
            _C.remove_file(os.path.join(directory, name))
        except OSError as error:
            warnings.warn(f"an unused file could not be removed: {error}", stacklevel=2)


def _named_by_others(directory: str, committed: str) -> set[str]:
    """The data files that metadata other than ``committed`` names."""
    named: set[str] = set()
    for name in os.listdir(directory):
        if name != committed and _METADATA_FILE.match(name):
            metadata = read_metadata(directory, name=name)
            named.update(info.relative_path for info in metadata.storage_data.values())
    return named
