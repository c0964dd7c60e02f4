"""What was learned, seen in spectra: bulks, spikes and tails of weights and kernels; how both align with targets.

>>> import torch, tangency as tg
>>> net, x = tg.models.mlp([20, 100, 1]), torch.randn(200, 20)
>>> before = tg.compute(tg.trace_ntk(net), x)
>>> tg.spectra.classify(before, before).kind
'invariant'
"""

from .alignment import Energy, cka, energy, label_alignment, principal_angles, target_alignment, weight_alignment
from .classify import Classified, classify
from .compare import Comparison, compare
from .density import Density, density
from .edges import Edge, bulk_edge
from .implicit import JacobianGram, jacobian_gram
from .marchenko_pastur import MarchenkoPastur, marchenko_pastur
from .ranks import Ranks, ranks
from .rotation import Rotation, rotation
from .tail import PowerLaw, Ratio, power_law
from .targets import jacobian_alignment, linear_alignment, norm_bound
from .values import eigenvalues
from .weights import WeightSpectrum, weights

__all__ = [
    "Classified",
    "Comparison",
    "Density",
    "Edge",
    "Energy",
    "JacobianGram",
    "MarchenkoPastur",
    "PowerLaw",
    "Ranks",
    "Ratio",
    "Rotation",
    "WeightSpectrum",
    "bulk_edge",
    "cka",
    "classify",
    "compare",
    "density",
    "eigenvalues",
    "energy",
    "jacobian_alignment",
    "jacobian_gram",
    "label_alignment",
    "linear_alignment",
    "marchenko_pastur",
    "norm_bound",
    "power_law",
    "principal_angles",
    "ranks",
    "rotation",
    "target_alignment",
    "weight_alignment",
    "weights",
]
