"""Other projects' training loops, on torch_ckpt.

Nothing in ``torch_ckpt`` imports these modules; each imports its project.
"""
