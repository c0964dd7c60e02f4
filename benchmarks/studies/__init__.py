"""What the kernels say: published figures and bounds, measured."""
