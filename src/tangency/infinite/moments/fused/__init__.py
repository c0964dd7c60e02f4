"""The recursion over images in one pass: all layers of one class of offsets at a time, nothing kept in between.

Convolutions, activations and sums never mix offsets t − s between the positions of a pair of images; only pooling does.
So a class of offsets can go through all layers by itself (Arora et al. 2019 took them together). `plan.py` says which
networks go this way, `choose.py` what computes them; `../recursion.py` stays the reference.

On a CPU: `program.py` makes tables of a plan, `compiled.py` is the loop over them (numba), `lanes.py` calls it.
"""
