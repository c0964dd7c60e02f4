"""Large Gram matrices, block by block."""
