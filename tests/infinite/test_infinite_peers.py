"""NNGP and NTK of 158 networks against neural-tangents 0.6.5, in float64 (numbers by fixtures/make_infinite.py)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency import infinite as inf

DATA = np.load(Path(__file__).parents[1] / "fixtures" / "infinite.npz")
CASES: dict[str, dict[str, Any]] = json.loads(str(DATA["cases"]))
# What we do not have: a normalisation by the variance that is no function of the value; position embeddings inside of
# attention that its values do not see, or that lie beside the channels (Positions() before SelfAttention is what both
# have); LayerNorm over the channels and one of two position axes.
OTHERS = {
    "act_exp_normalized", "attention_pos_sum", "attention_pos_concat", "attention_pos_decay", "attention_sqrt_pos",
    "mask_attention_pos", "layernorm_conv_height",
}  # fmt: skip
ACTIVATIONS = {
    "Relu": inf.Relu, "LeakyRelu": lambda slope: inf.LeakyRelu(slope), "ABRelu": lambda a, b: inf.ABRelu(a, b),
    "Abs": inf.Abs, "Sign": inf.Sign, "Erf": inf.Erf, "SigmoidLike": inf.SigmoidLike, "Gelu": inf.Gelu, "Sin": inf.Sin,
    "Cos": inf.Cos, "Rbf": inf.Rbf, "Gabor": inf.Gabor, "Gaussian": inf.Gaussian, "Exp": inf.Exp,
    "Hermite": inf.Hermite, "Monomial": inf.Monomial, "RectifiedMonomial": inf.RectifiedMonomial,
    "Identity": inf.Identity,
    "Polynomial": lambda coefficients: inf.Polynomial(tuple(coefficients)), "Tanh": nn.Tanh, "Softplus": nn.Softplus,
    "Sigmoid": nn.Sigmoid, "Silu": nn.SiLU,
}  # fmt: skip


def windows(kind: str, k: Any) -> tuple[int, ...]:
    return (k,) * int(kind[-2]) if isinstance(k, int) else tuple(k)


def sized(v: Any) -> Any:
    return v if isinstance(v, int) else tuple(v)


def network(nodes: list[Any], channel: int) -> inf.Serial:
    return inf.Serial(*(layer(kind, dict(options), channel) for kind, options in nodes))


def layer(kind: str, o: dict[str, Any], channel: int) -> Any:
    """The same layer, ours."""
    o.pop("parametrization", None)  # the kernel's
    if kind in ACTIVATIONS:
        return ACTIVATIONS[kind](**o)
    own = {"w_var": o.get("w_var"), "b_var": o.get("b_var", 0.0), "bias": "b_var" in o, "width": o.get("width")}
    if kind == "Linear":
        return inf.Linear(**own)
    if kind.startswith(("Conv", "LocallyConnected")) and kind != "Concat":
        place = {k: sized(o[k]) for k in ("stride", "padding") if k in o}
        if kind.startswith("ConvTranspose"):
            return inf.ConvTranspose(windows(kind, o["k"]), **place, **own)
        local, circular = kind.startswith("Local"), o.get("padding_mode") == "circular"
        return inf.Conv(windows(kind, o["k"]), **place, circular=circular, local=local, **own)
    if kind.startswith(("AvgPool", "SumPool")):
        place = {k: sized(o[k]) for k in ("stride", "padding") if k in o}
        if kind.startswith("SumPool"):
            return inf.SumPool(windows(kind, o["k"]), **place)
        return inf.AvgPool(windows(kind, o["k"]), **place, edges=not o.get("count_include_pad", True))
    if kind in ("Sum", "Prod", "Concat"):
        branches = [network(b, channel) for b in o["branches"]]
        if kind == "Concat":
            return inf.Concat(*branches, axis=None if o["axis"] == "channels" else int(o["axis"][-1]))
        return (inf.Sum if kind == "Sum" else inf.Product)(*branches)
    if kind == "Attention":
        scaling = "sqrt" if "scaling" in o else "linear"
        qk, ov = o["q_var"] * o["k_var"], o["v_var"] * o["o_var"]
        found = inf.SelfAttention(scaling, o["mechanism"].lower(), qk, ov, o.get("b_var", 0.0), channel)
        return inf.Serial(inf.Positions(o["pos_var"]), found) if "pos" in o else found
    return SIMPLE[kind](o, channel)


SIMPLE = {
    "Flatten": lambda o, c: inf.Flatten(),
    "GlobalAvgPool": lambda o, c: inf.GlobalAvgPool(c),
    "GlobalSumPool": lambda o, c: inf.GlobalSumPool(c),
    "Dropout": lambda o, c: inf.Dropout(o["p"]),
    "Scale": lambda o, c: inf.Scale(o["factor"]),
    "LayerNorm": lambda o, c: inf.LayerNorm(c, o["over"] != "channels", eps=o.get("eps", 1e-12)),
    "Index": lambda o, c: inf.Index(*(slice(*p) if isinstance(p, list) else p for p in o["positions"])),
    "PositionMatrix": lambda o, c: inf.PositionMatrix(torch.from_numpy(DATA["position_matrix"])),
    "Upsample": lambda o, c: nn.Upsample(size=tuple(o["size"]), mode=o["mode"]),
}


class Graph(nn.Module):
    """A net on graphs, as one writes it in torch: the adjacency is a second input."""

    def __init__(self, nodes: list[Any]) -> None:
        super().__init__()
        self.kinds = [kind for kind, _ in nodes]
        first = self.kinds.index("Linear")
        sizes = [4 if k == first else 8 for k in range(len(nodes))]
        if "Flatten" in self.kinds:
            sizes[-1] = 40
        made = [
            nn.Linear(sizes[k], 8, bias="b_var" in o) if kind == "Linear" else nn.Identity()
            for k, (kind, o) in enumerate(nodes)
        ]
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for kind, m in zip(self.kinds, self.layers, strict=True):
            if kind == "Aggregate":
                x = torch.bmm(adjacency.transpose(1, 2), x)
            elif kind == "Relu":
                x = torch.relu(x)
            elif kind == "GlobalAvgPool":
                x = x.mean(1)
            elif kind == "GlobalSumPool":
                x = x.sum(1)
            elif kind == "Flatten":
                x = x.flatten(1)
            else:
                x = m(x)
        return x


def kernel(name: str) -> inf.Infinite:
    case = CASES[name]
    nodes, kind = case["layers"], case["inputs"]
    channel = -1 if kind in ("tokens", "masked_tokens", "vector", "graph") else 0
    if kind == "graph":
        named = {f"layers.{k}": o for k, (what, o) in enumerate(nodes) if what == "Linear"}
        numbers = {v: {k: o.get(v, 0.0) for k, o in named.items()} for v in ("w_var", "b_var")}
        return tg.infinite_ntk(Graph(nodes), **numbers)
    net: Any = network(nodes, channel)
    standard = any(o.get("parametrization") == "standard" for _, o in nodes)
    if name == "standard_mixed":  # one layer of each: the first in the NTK parametrisation, by its learning rate
        return tg.infinite_ntk(net, parametrization="standard", lr={"0.weight": 1.7 / 5, "0.bias": 0.1, "": 1.0})
    net = inf.Masked(net) if kind.startswith("masked") else net
    return tg.infinite_ntk(net, parametrization="standard" if standard else "ntk")


def inputs(kind: str, which: str, few: int | None = None) -> Any:
    x = torch.from_numpy(DATA[f"x_{kind}_{which}"])
    if kind == "graph":
        return x, torch.from_numpy(DATA[f"adjacency_graph_{which}"]).double()
    if kind.startswith("masked"):
        return x[:few], torch.from_numpy(DATA[f"mask_{kind}_{which}"]).bool()[:few]
    return x


@pytest.mark.parametrize("name", [name for name in CASES if name not in OTHERS])
@pytest.mark.every(3)
def test_agrees_with_neural_tangents(name: str) -> None:
    k, kind, error = kernel(name), CASES[name]["inputs"], CASES[name]["error"]
    few = 3 if name == "mask_conv_valid" else None  # the last sample has no position left: we refuse it, theirs is 0
    x1, x2 = inputs(kind, "1", few), inputs(kind, "2", few)
    ours = {"11": k.both(x1), "12": k.both(x1, x2)}
    for which, pair in ours.items():
        for what, got in zip(("nngp", "ntk"), pair, strict=True):
            theirs = torch.from_numpy(DATA[f"{name}/{what}_{which}"])[:few, :few]
            if theirs.dim() == 4:
                theirs = theirs.permute(0, 2, 1, 3)
            scale = float(theirs.abs().max())
            assert got.shape == theirs.shape
            off = (got - theirs).abs() / max(scale, 1e-300)
            off = off.amax((1, 3)) if off.dim() == 4 else off
            # Where an input meets itself, theirs is good to half the digits only, as the script measured.
            itself = (
                torch.eye(*off.shape, dtype=torch.bool) if which == "11" else torch.zeros_like(off, dtype=torch.bool)
            )
            itself[1, 0] |= which == "12"  # x2[0] is a copy of x1[1]
            assert float(off[~itself].max()) < 1e-9, f"{what}_{which}: {float(off[~itself].max()):.1e}"
            assert float(off[itself].max()) < 1e-8 + 4 * error["same_input"], f"{what}_{which}: {off[itself]}"


# Of every kind: activations with and without a kink, positions, pooling, norms, attention, graphs, masks.
IN_FLOAT32 = (
    "fc_relu10", "fc_erf5", "act_sign", "act_tanh", "act_gelu_cnn", "act_hermite3", "conv1d_positions", "conv2d_5x5",
    "conv_local_mean", "conv_transpose2d", "avg_pool_overlap", "resnet_layernorm", "densenet", "gated_conv",
    "dropout_conv_flatten", "attention_softmax_deep", "transformer", "graph_flatten", "mask_conv_stride",
    "standard_mixed", "upsample_bilinear",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_agrees_in_float32(name: str) -> None:
    """The largest error of all networks, measured, is 4e-7 of the largest entry; copies and near copies included."""
    k, kind, error = replace(kernel(name), dtype=torch.float32), CASES[name]["inputs"], CASES[name]["error"]
    x1, x2 = inputs(kind, "1"), inputs(kind, "2")
    for which, pair in {"11": k.both(x1), "12": k.both(x1, x2)}.items():
        for what, got in zip(("nngp", "ntk"), pair, strict=True):
            theirs = torch.from_numpy(DATA[f"{name}/{what}_{which}"])
            theirs = theirs.permute(0, 2, 1, 3) if theirs.dim() == 4 else theirs
            off = (got.double() - theirs).abs() / theirs.abs().max().clamp(min=1e-300)
            assert got.dtype == torch.float32
            assert float(off.max()) < 1e-6 + 4 * error["same_input"], f"{what}_{which}: {float(off.max()):.1e}"


def test_there_are_many() -> None:
    assert len(CASES) - len(OTHERS) >= 150
