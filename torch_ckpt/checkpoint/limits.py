"""Limits on threads and memory, shared by all readers of checkpoints."""

#: The smallest max_inflight_bytes: with less memory, a load would be mostly overhead.
LEAST_INFLIGHT_BYTES = 1 << 20

#: Number of concurrent reads. It may exceed the number of cores: the threads wait for the disk.
DEFAULT_THREADS = 8
