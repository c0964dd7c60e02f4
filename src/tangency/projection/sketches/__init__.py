"""Random projections of gradients: which entries the random matrix has, and how it is multiplied with a block."""
