"""What a checkpoint holds, whether it is whole, and how two differ."""
