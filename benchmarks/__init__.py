"""Benchmarks of torch_ckpt against stock torch.distributed.checkpoint and the machine's own limits.

``python -m benchmarks.run`` measures and writes one JSON file. ``python -m benchmarks.report``
turns such a file into tables, charts and the blocks of numbers in the documents.
``benchmarks.suites`` has the measurements, ``benchmarks.targets`` their targets.
"""
