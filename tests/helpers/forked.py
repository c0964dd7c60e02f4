"""Processes of their own that need not import torch first: they are forked from one that has."""

import multiprocessing

FORK = multiprocessing.get_context("forkserver")
# The last is what torch imports at its first gradient, which takes longer than most jobs.
FORK.set_forkserver_preload(["store_job", "memory_job", "zarr", "torch", "torch.fx.experimental.symbolic_shapes"])
