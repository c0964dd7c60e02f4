"""From a module and inputs to per-sample gradients, and from these to entries of a Gram matrix."""
