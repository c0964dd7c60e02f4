"""The recursion over images in one pass: all layers of one class of offsets at a time, nothing kept in between.

Convolutions, activations and sums never mix offsets t − s between the positions of a pair of images; only pooling
does. So a class of offsets can go through all layers by itself (Arora et al. 2019 took all at once, layer by layer).

- `plan.py` says which networks go this way, `choose.py` what computes them; `../recursion.py` stays the reference;
- on a GPU: `stages.py` cuts a plan where values must go through memory, `layout.py` says which lane has what,
  `arithmetic.py` writes a row's arithmetic, `source.py` the kernel around it (with `device.cu`), `cuda.py` puts data as
  kernels read it, `gpu.py` compiles and launches;
- on a CPU: `program.py` makes tables of a plan, which the loops of `compiled.py` follow; `lanes.py` calls them.
"""
