"""Second moments of hidden values, and how operations change them.

To be read in this order:
- `core.py`: what moments are, and the three operations that every network consists of;
- `ops.py`, `positions.py`, `batchnorm.py`, `sequences.py`: the others; `heads.py` and `draws.py`: what attention does;
  `sampled.py` and `nongaussian.py`: activations whose moments are means over points;
- `recursion.py`: a network as a list of operations, and the loop over it; `assemble.py`: from there to a Gram matrix;
  `fused/`: the same for images, all layers in one compiled pass;
- `fields.py`: how that list grows while a network is read; `functions.py`, `joins.py`, `shapes.py`: what is done with
  its values on the way.
"""
