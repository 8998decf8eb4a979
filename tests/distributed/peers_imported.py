"""Megatron-core and nvidia-resiliency-ext, imported where there may be no GPU, which they take for
granted. Only for processes whose ranks run their code: other tests need torch.cuda as it is.
"""

from contextlib import suppress
from importlib import import_module

from benchmarks import no_cuda

no_cuda.pretend()
for _name in (
    "megatron.core.dist_checkpointing.strategies.torch",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt",
):
    with suppress(ImportError):
        import_module(_name)
