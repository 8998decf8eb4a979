"""Benchmarks of torch_ckpt against stock torch.distributed.checkpoint and the machine's own limits.

``python -m benchmarks.run`` measures and writes one JSON file. ``python -m benchmarks.report``
fills the tables of the documents from such files. ``benchmarks.groups`` has the measurements.
"""
