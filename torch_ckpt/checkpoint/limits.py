"""Limits of threads and memory that all readers of checkpoints have."""

#: The least value of max_inflight_bytes: with less memory a load would be mostly overhead.
LEAST_INFLIGHT_BYTES = 1 << 20

#: Number of reads at once. The threads wait for the disk, so there may be more of them than cores.
DEFAULT_THREADS = 8
