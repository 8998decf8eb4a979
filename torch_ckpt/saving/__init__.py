"""From a state dict to a committed checkpoint, at once or beside training."""
