"""One checkpoint on disk: its opened directory, its metadata, and its objects, read safely."""
