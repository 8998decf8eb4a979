"""What the ranks of a training job do together, for whole trees of values.

They agree on a name, a tree or the step to stop at, send a tree from one rank to all, gather and
compare the trees of all, and make DTensors of local tensors.

In the meaning of ``jax.experimental.multihost_utils``, in the terms of ``torch.distributed``.
Without that every function works too, with one rank. Names, checksums and steps go through the
process group's store, so that a rank that is dead or does something else is named on all others in
place of a hang; tensors go by its collectives. docs/multihost.md has more.
"""

import torch_ckpt._base.supported_torch  # noqa: F401
from torch_ckpt.multihost.comparison import assert_equal, sync_global_devices
from torch_ckpt.multihost.layout import global_to_local, local_to_global
from torch_ckpt.multihost.moving import broadcast_one_to_all, process_allgather
from torch_ckpt.ranks.calls import RanksDisagree
from torch_ckpt.ranks.preemption import (
    PreemptionWatch,
    reached_preemption_sync_point,
    watch_for_preemption,
)

__all__ = [
    "PreemptionWatch",
    "RanksDisagree",
    "assert_equal",
    "broadcast_one_to_all",
    "global_to_local",
    "local_to_global",
    "process_allgather",
    "reached_preemption_sync_point",
    "sync_global_devices",
    "watch_for_preemption",
]
