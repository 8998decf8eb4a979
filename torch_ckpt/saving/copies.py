"""Sharded tensors that several ranks save under one name.

A DTensor belongs to a mesh. DTensors of one name may have several meshes: tied weights of two
pipeline stages, or a mesh for each tensor-parallel group. Only one of them is saved, so they must
be copies of one tensor. A group of ranks that saves experts of its own under the same names as
another group would lose them. So:

1. Every rank sends a hash of the layout, a mesh and placements, of its DTensors.
2. The coordinator refuses a name whose layouts do not all have all shards of the tensor. It
   requests checksums of the shards that several layouts have. Other names cost nothing. Other
   sharded tensors, such as ShardedTensors, have no mesh: the ranks send checksums of all shards
   that several ranks have.
3. The ranks send these checksums with the results of their writes.
4. The coordinator compares the checksums before it commits (saving/run.py).

csrc/planning/global_plan.h decides; this module words the error.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_ckpt._base.formatting import ranks_text
from torch_ckpt.saving.replica_check import differ_text, versions_text

#: Name, the groups of ranks that have the same version, and the ranks of each mesh, if known.
DifferingCopy = tuple[str, list[list[int]], list[list[int]]]


def text_of_copies(differing: Sequence[DifferingCopy]) -> str:
    """Returns the text of the error about copies that differ."""
    lines = []
    for name, groups, meshes in differing:
        lines.append(f"{name}: {versions_text(groups[:5])}")
        if meshes:
            shown = [f"({ranks_text(ranks)})" for ranks in meshes[:5]]
            shown += [f"{len(meshes) - 5} more"] if len(meshes) > 5 else []
            lines[-1] += f", on the meshes {', '.join(shown)}"
    loss = " that have the same shards, but only one rank's values would be saved"
    return (
        f"{differ_text('sharded tensor', lines, loss)}. If each group of ranks has a tensor of its "
        "own (experts, for example), use a different name in each group, or a DTensor on one mesh "
        "of all groups. If the tensors are copies, find out why they diverged."
    )
