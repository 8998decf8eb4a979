"""Imports Megatron-core and nvidia-resiliency-ext, which require a GPU, on machines without one.
Only for processes whose ranks run their code: other tests need the unchanged torch.cuda."""

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
