"""Networks of infinite width: their Gaussian process and their tangent kernel, by recursion over the layers.

`tg.infinite_ntk(module)` reads an nn.Module. Here are the layers themselves, to compose by hand; `tg.studies` looks at
how finite networks tend to them.

>>> import torch, tangency as tg
>>> from tangency.infinite import Conv, Flatten, Linear, Relu, Serial
>>> net = Serial(Conv((3, 3), padding=1), Relu(), Flatten(), Linear())
>>> tg.infinite_ntk(net, w_var=2.0)(torch.randn(4, 3, 8, 8)).shape
torch.Size([4, 4])
"""

# Inside, each folder imports only from those before it:
#
# - `activations`: Gaussian moments of activations, E[φ(u)φ(v)] and E[φ'(u)φ'(v)];
# - `moments`: the recursion, operations on the second moments of hidden values, run over blocks of pairs of samples;
#   `moments/fused` has it for images in one pass, on a GPU or a CPU;
# - `layers`: what a network is made of, each adding its operations to the recursion;
# - `reading`: an nn.Module as a layer, by its graph. A second reader, without a graph, would stand there too.
#
# On top of them `compose` (layers made of others), `kernel` (the recursion as a kernel like all others), `make`
# (`infinite_ntk`, `infinite_nngp`) and `finite` (networks of finite width in the same parametrisation).

from .activations.duals import (
    ABRelu,
    Abs,
    Cos,
    Erf,
    Exp,
    Gabor,
    Gaussian,
    Gelu,
    Hermite,
    Identity,
    LeakyRelu,
    Monomial,
    Polynomial,
    Rbf,
    RectifiedMonomial,
    Relu,
    SigmoidLike,
    Sign,
    Sin,
    Step,
)
from .activations.quadrature import HermiteExpansion, Quadrature
from .compose import Concat, Masked, Product, Serial, Sum
from .finite import draw, empirical_nngp, empirical_ntk, readout_nngp
from .kernel import Infinite
from .layers.basic import Dropout, Layer, LayerNorm, Linear
from .layers.gated import GRU, LSTM
from .layers.sequences import RNN, Embedding, SelfAttention
from .layers.spatial import (
    AvgPool,
    Conv,
    ConvTranspose,
    Flatten,
    GlobalAvgPool,
    GlobalSumPool,
    Index,
    PositionMatrix,
    Positions,
    Scale,
    SumPool,
)
from .layers.twin import Twin
from .make import infinite_nngp, infinite_ntk

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "ABRelu",
    "Abs",
    "AvgPool",
    "Concat",
    "Conv",
    "ConvTranspose",
    "Cos",
    "Dropout",
    "Embedding",
    "Erf",
    "Exp",
    "Flatten",
    "Gabor",
    "Gaussian",
    "Gelu",
    "GlobalAvgPool",
    "GlobalSumPool",
    "Hermite",
    "HermiteExpansion",
    "Identity",
    "Index",
    "Infinite",
    "Layer",
    "LayerNorm",
    "LeakyRelu",
    "Linear",
    "Masked",
    "Monomial",
    "Polynomial",
    "PositionMatrix",
    "Positions",
    "Product",
    "Quadrature",
    "Rbf",
    "RectifiedMonomial",
    "Relu",
    "Scale",
    "SelfAttention",
    "Serial",
    "SigmoidLike",
    "Sign",
    "Sin",
    "Step",
    "Sum",
    "SumPool",
    "Twin",
    "draw",
    "empirical_nngp",
    "empirical_ntk",
    "infinite_nngp",
    "infinite_ntk",
    "readout_nngp",
]
