"""A checkpoint on disk: access to its directory, and safe decoding of its metadata and objects."""
