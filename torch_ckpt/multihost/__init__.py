"""Operations on trees of values across the ranks of a training job.

Ranks synchronize at a named point, compare trees, broadcast a tree from one rank, gather the trees
of all ranks, convert local tensors to DTensors and back, and agree on the step at which to stop.

The functions correspond to ``jax.experimental.multihost_utils``. Without an initialized process
group, they treat the process as a single rank. Names, checksums and steps are exchanged through the
process group's store. If a rank has died or called a different function, the other ranks raise an
error that names the rank, instead of hanging. Tensors are sent by the group's collectives. See
docs/multihost.md.
"""

import torch_ckpt._base.supported_torch  # noqa: F401
from torch_ckpt.multihost.comparison import assert_equal, sync_global_devices
from torch_ckpt.multihost.layout import global_to_local, local_to_global
from torch_ckpt.multihost.moving import broadcast_one_to_all, process_allgather
from torch_ckpt.multihost.preemption import (
    PreemptionWatch,
    reached_preemption_sync_point,
    watch_for_preemption,
)
from torch_ckpt.ranks.collective_call import RanksDisagree

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
