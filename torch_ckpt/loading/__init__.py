"""From a checkpoint into the tensors of a state dict."""
