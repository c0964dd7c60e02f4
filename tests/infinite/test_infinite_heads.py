"""Attention with infinitely many heads: against neural-tangents' numbers, finite networks, and its own identities."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tangency.errors import InputError
from tangency.infinite.moments import draws
from tangency.infinite.moments.draws import Sequences
from tangency.infinite.moments.heads import (
    AttentionLayer,
    Projection,
    SequencePairs,
    linear_heads,
    own_softmax_heads,
    quadratic_heads,
    softmax_heads,
)

VARS = {"q_var": 1.5, "k_var": 0.8, "v_var": 1.2, "o_var": 0.7}


def moments(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("nsc,mtc->nmst", a, b) / a.shape[-1]


def own_moments(a: Tensor) -> Tensor:
    return a @ a.mT / a.shape[-1]


def inputs(n: int, t: int, c: int = 5, seed: int = 0) -> Tensor:
    return torch.randn(n, t, c, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(
    variances: tuple[float, ...],
    biases: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0),
    rates: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
    bias_rates: tuple[float, ...] | None = None,
    **options: Any,
) -> AttentionLayer:
    """A layer by what its four projections have; trained biases count by their variance, the NTK parametrisation."""
    numbers = zip(variances, rates, biases, biases if bias_rates is None else bias_rates, strict=True)
    return AttentionLayer(*(Projection(*map(float, four)) for four in numbers), **options)


def softmax(
    cov: Tensor, ntk: Tensor | None, cov1: Tensor, cov2: Tensor, *, q_var: float, k_var: float, v_var: float,
    o_var: float, mask1: Tensor | None = None, mask2: Tensor | None = None, tangent: bool = True, **options: Any,
) -> Any:  # fmt: skip
    pairs = SequencePairs(cov, ntk, Sequences(cov1, mask1), Sequences(cov2, mask2), tangent)
    return softmax_heads(layer((q_var, k_var, v_var, o_var), **options), pairs)


def own(cov: Tensor, ntk: Tensor | None, *, mask: Tensor | None = None, tangent: bool = True, **options: Any) -> Any:
    variances = tuple(options.pop(f"{name}_var") for name in "qkvo")
    side = Sequences(cov, mask)
    return own_softmax_heads(layer(variances, **options), SequencePairs(cov, ntk, side, side, tangent))


def closed_form(
    name: str, cov: Tensor, ntk: Tensor | None, cov1: Tensor, cov2: Tensor, *, qk_var: float, ov_var: float,
    b_var: float = 0.0, b_rate: float | None = None, rates: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
    mask1: Tensor | None = None, mask2: Tensor | None = None, tangent: bool = True,
) -> Any:  # fmt: skip
    """Scores as they are ("quadratic"), or constants that `name` is applied to."""
    pairs = SequencePairs(cov, ntk, Sequences(cov1, mask1), Sequences(cov2, mask2), tangent)
    bias_rates = (0.0, 0.0, 0.0, b_var if b_rate is None else b_rate)
    four = layer((qk_var, 1.0, 1.0, ov_var), (0.0, 0.0, 0.0, b_var), rates, bias_rates)
    return quadratic_heads(four, pairs) if name == "quadratic" else linear_heads(four, pairs, name)


def kernel(x: Tensor, y: Tensor, f: Any = softmax, upstream: float = 0.0, **options: Any) -> Any:
    """`f` on the moments of x and y, with a tangent kernel from below if `upstream`."""
    cov = moments(x, y)
    theta = upstream * (cov + cov**3) if upstream else None
    return f(cov, theta, own_moments(x), own_moments(y), **options)


def close(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def diagonal(found: Any) -> list[Tensor]:
    """Each sample with itself, out of all pairs."""
    return [v.diagonal(dim1=0, dim2=1).movedim(-1, 0) for v in found]


# One dense layer (W_std 1.2, b_std 0.3), then neural_tangents.stax.GlobalSelfAttention (0.6.5; W_key_std 1.3,
# W_query_std 0.9, W_value_std 0.8, W_out_std 1.1, b_std 0.4) on x and y below: nngp and ntk at `PROBES`
# ([0, 0, 0, 1], [0, 1, 2, 0], [2, 1, 1, 0]); then the same with the positions x[0, 3:], x[2, 2:] and y[1, 1:] masked.
PEER: dict[str, list[list[float]]] = {
    "softmax": [
        [0.33756440885, 0.3679646502, 0.2516951655],
        [0.69269322655, 0.78389395059, 0.43508549651],
        [0.33132274641, 0.59949062197, 0.27532748985],
        [0.67396823924, 1.4784718659, 0.50598246955],
    ],
    "identity": [
        [0.47258639923, 0.88995383672, 0.43916793308],
        [1.0977591977, 2.3498615102, 0.99750379925],
        [0.28460117865, 0.9312070879, 0.30369458934],
        [0.53380353596, 2.4736212637, 0.59108376801],
    ],
    "relu": [
        [0.56392566857, 0.944358904, 0.38132636674],
        [1.3717770057, 2.513076712, 0.82397910023],
        [0.36663752986, 0.9312070879, 0.30369458934],
        [0.77991258958, 2.4736212637, 0.59108376801],
    ],
    "abs": [
        [0.65526493792, 0.99876397129, 0.34402057572],
        [1.6457948138, 2.6762919139, 0.71206172717],
        [0.44867388107, 0.9312070879, 0.30369458934],
        [1.0260216432, 2.4736212637, 0.59108376801],
    ],
    "quadratic": [
        [0.64602486753, 1.6198974736, 0.46279505321],
        [3.5621740727, 10.379282315, 2.2795653725],
        [0.48872600307, 0.82175023526, 0.17295419758],
        [2.4610820215, 4.7922516468, 0.25067938305],
    ],
}


def peer_inputs() -> tuple[Tensor, Tensor]:
    grid = torch.arange(60, dtype=torch.float64)
    return torch.sin(grid**2 / 7).view(3, 4, 5), torch.cos(grid[:40] ** 2 / 11).view(2, 4, 5)


PROBES = ([0, 0, 2], [0, 1, 1], [0, 2, 1], [1, 0, 0])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["softmax", "identity", "relu", "abs", "quadratic"])
def test_closed_forms_are_those_of_neural_tangents(name: str, masked: bool) -> None:
    x, y = peer_inputs()
    mask1, mask2 = (torch.ones(len(v), 4, dtype=torch.bool) for v in (x, y))
    mask1[0, 3:] = mask1[2, 2:] = mask2[1, 1:] = False
    cov, cov1, cov2 = (1.44 * v + 0.09 for v in (moments(x, y), own_moments(x), own_moments(y)))
    options: dict[str, Any] = {"qk_var": (1.3 * 0.9) ** 2, "ov_var": (0.8 * 1.1) ** 2, "b_var": 0.16}
    options |= {"mask1": mask1, "mask2": mask2} if masked else {}
    f = partial(closed_form, name)
    nngp, ntk = f(cov, cov, cov1, cov2, **options)
    want = torch.tensor(PEER[name], dtype=torch.float64)[2 * masked : 2 * masked + 2]
    torch.testing.assert_close(torch.stack([nngp[PROBES], ntk[PROBES]]), want, rtol=1e-9, atol=0)
    frozen = f(cov, cov, cov1, cov2, rates=(0, 0, 0, 0), b_rate=0.0, **options)[1]
    bare = f(cov, None, cov1, cov2, **options)[1]
    torch.testing.assert_close(frozen + bare, ntk)
    options |= {"mask2": mask1} if masked else {}
    square = 1.44 * moments(x, x) + 0.09
    close(f(cov1, cov1, cov1, cov1, **options), diagonal(f(square, square, cov1, cov1, **options)))
    options |= {"mask2": mask2} if masked else {}
    assert f(cov, cov, cov1, cov2, tangent=False, **options)[1] is None


class Net(nn.Module):
    """A dense layer and nn.MultiheadAttention, all weights and biases Gaussian with the variances of `VARS`."""

    def __init__(self, c: int, e: int, count: int, biases: tuple[float, ...]) -> None:
        super().__init__()
        self.dense = nn.Linear(c, e, bias=False)
        self.heads = nn.MultiheadAttention(e, count, batch_first=True)
        with torch.no_grad():
            self.dense.weight.normal_(0, c**-0.5)
            for k, (v, b) in enumerate(zip(VARS.values(), biases, strict=True)):
                weight = self.heads.out_proj.weight if k == 3 else self.heads.in_proj_weight[k * e : (k + 1) * e]
                bias = self.heads.out_proj.bias if k == 3 else self.heads.in_proj_bias[k * e : (k + 1) * e]
                weight.normal_(0, (v / e) ** 0.5)
                bias.normal_(0, b**0.5)

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        h = self.dense(x)
        return self.heads(h, h, h, need_weights=False, **masks)[0]


def finite(x: Tensor, biases: tuple[float, ...], nets: int, e: int, count: int, **masks: Any) -> tuple[Tensor, Tensor]:
    """Kernels [parts, n·T, n·T] of finite networks, mean and standard error: nngp, then what each parameter adds.

    The parts: dense, W_q, W_k, W_v, W_o (each times variance/fan-in: the NTK parametrisation), b_q, b_k, b_v, b_o.
    """
    found = []
    for seed in range(nets):
        torch.manual_seed(seed)
        net = Net(x.shape[-1], e, count, biases).float()
        params = {k: v.detach() for k, v in net.named_parameters()}
        probe = torch.randn(e).sign() / e**0.5

        def outputs(p: dict[str, Tensor], net: nn.Module = net, probe: Tensor = probe) -> Tensor:
            return (functional_call(net, p, (x.float(),), masks) @ probe).flatten()

        jac = torch.func.jacrev(outputs)(params)
        values = functional_call(net, params, (x.float(),), masks).flatten(0, 1)
        variances = list(VARS.values())
        parts = [values @ values.mT / e]
        rows = [jac["dense.weight"] / x.shape[-1] ** 0.5]
        rows += [w * (v / e) ** 0.5 for w, v in zip(jac["heads.in_proj_weight"].split(e, 1), variances, strict=False)]
        rows += [jac["heads.out_proj.weight"] * (variances[3] / e) ** 0.5]
        rows += [*jac["heads.in_proj_bias"].split(e, 1), jac["heads.out_proj.bias"]]
        parts += [r.flatten(1) @ r.flatten(1).mT for r in rows]
        found.append(torch.stack(parts).double().detach())
    stack = torch.stack(found)
    return stack.mean(0), stack.std(0) / nets**0.5


def infinite(x: Tensor, biases: Any, **options: Any) -> Tensor:
    """The same parts at infinite width."""
    cov, cov1 = moments(x, x), own_moments(x)
    nothing = (0.0, 0.0, 0.0, 0.0)

    def part(k: int) -> Tensor:
        one = tuple(float(j == k) for j in range(8))
        ntk = cov if k < 0 else None
        rates = {"rates": one[:4], "bias_rates": one[4:]} if k >= 0 else {"rates": nothing, "bias_rates": nothing}
        return softmax(cov, ntk, cov1, cov1, **VARS, biases=biases, samples=8192, **rates, **options)[1]

    nngp = softmax(cov, None, cov1, cov1, **VARS, biases=biases, samples=8192, tangent=False, **options)[0]
    n, t = x.shape[:2]
    return torch.stack([nngp, *(part(k) for k in range(-1, 8))]).transpose(2, 3).reshape(-1, n * t, n * t)


SETTINGS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "biases": ((0.5, 0.4, 0.3, 0.2), {}, {}),
    "padding": (
        (0.0, 0.0, 0.0, 0.0),
        {"key_padding_mask": torch.tensor([[False, False, False], [False, False, True]])},
        dict.fromkeys(("mask1", "mask2"), torch.tensor([[True, True, True], [True, True, False]])),
    ),
    "causal": ((0.0, 0.0, 0.0, 0.0), {"attn_mask": torch.ones(3, 3).triu(1).bool()}, {"causal": True}),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.every(3)
def test_wide_multihead_attention(name: str) -> None:
    """nn.MultiheadAttention, each of its parameters alone and the layer below it, to four standard errors."""
    biases, finite_masks, masks = SETTINGS[name]
    x = inputs(2, 3, 4)
    mean, error = finite(x, biases, nets=80, e=256, count=8, **finite_masks)
    want = infinite(x, biases, **masks)
    assert ((mean - want).abs() <= 4 * error + 1e-5).all()
    power = error.flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp_min(1e-9)
    assert power[[0, 1, 2, 3, 4, 5, 6, 8]].max() < 0.1  # the comparison says something
    assert want[7].abs().max() < 1e-12  # the keys' bias does nothing
    cov, cov1 = moments(x, x), own_moments(x)
    whole = softmax(cov, cov, cov1, cov1, **VARS, biases=biases, bias_rates=(1, 1, 1, 1), samples=8192, **masks)[1]
    torch.testing.assert_close(whole.transpose(1, 2).reshape(6, 6), want[1:].sum(0))


def obvious(x: Tensor, y: Tensor, theta: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The definition for one pair: G from its whole covariance, softmax's Jacobian, Θ_G with four indices."""
    t, s = len(x), len(y)
    z = torch.cat([x, y])
    cov = z @ z.mT / z.shape[-1]
    values, vectors = torch.linalg.eigh(VARS["q_var"] * VARS["k_var"] * torch.kron(cov, cov))
    draw = torch.randn(samples, len(values), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    scores = (draw * values.clamp_min(0).sqrt() @ vectors.mT).view(samples, t + s, t + s)
    a, b = torch.softmax(scores[:, :t, :t], -1), torch.softmax(scores[:, t:, t:], -1)
    ja, jb = (torch.diag_embed(v) - v[..., :, None] * v[..., None, :] for v in (a, b))  # [samples, query, key, key]
    k = cov[:t, t:]
    ov, qk = VARS["o_var"] * VARS["v_var"], VARS["q_var"] * VARS["k_var"]
    score_ntk = qk * (torch.einsum("st,uv->sutv", theta + k, k) + torch.einsum("st,uv->sutv", k, theta + k))
    through = torch.einsum("sutv,bsuw,wz,btzv->bst", score_ntk, ja, k, jb)
    nngp = ov * a @ k @ b.mT
    ntk = 2 * nngp + ov * (a @ theta @ b.mT + through)
    both = torch.stack([nngp, ntk])
    return both.mean(1), both.std(1) / samples**0.5


@pytest.mark.parametrize("sizes", [(3, 3), (4, 2)])
def test_monte_carlo_is_that_of_the_definition(sizes: tuple[int, int]) -> None:
    x, y = (inputs(1, t, 3, seed=t + k) for k, t in enumerate(sizes))
    mean, error = obvious(x[0], y[0], (moments(x, y) + moments(x, y) ** 3)[0, 0], 20000)
    found = torch.stack(kernel(x, y, upstream=1.0, samples=8192, **VARS))[:, 0, 0]
    assert ((found - mean).abs() < 4 * error).all()


def errors(
    cov: Tensor, ntk: Tensor | None, cov1: Tensor, cov2: Tensor, *, repeats: int = 8, seed: int = 0, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Standard errors of `softmax` with the same arguments: the spread over `repeats` seeds, so many times the cost.

    Draws that are orthogonal to one another vary together, so their own spread would say too much.
    """
    found = [softmax(cov, ntk, cov1, cov2, seed=seed + k, **options) for k in range(repeats)]
    nngp = torch.stack([a for a, _ in found]).std(0)
    theta = [b for _, b in found if b is not None]
    return nngp, torch.stack(theta).std(0) if theta else None


@pytest.mark.slow
def test_errors_fall_as_stated() -> None:
    """At least as the root of the number of draws, and faster until all directions are drawn; `errors` says it."""
    x, y = inputs(2, 4, seed=1), inputs(2, 4, seed=2)
    best = kernel(x, y, upstream=1.0, samples=40000, seed=99, **VARS)
    size = []
    for samples in (16, 128, 1024):
        found = [kernel(x, y, upstream=1.0, samples=samples, seed=k, **VARS) for k in range(8)]
        size.append([torch.stack([(a[k] - best[k]) ** 2 for a in found]).mean().sqrt() for k in range(2)])
    for k in range(2):
        assert size[1][k] < size[0][k] / 8**0.5 * 1.2
        assert size[2][k] < size[0][k] / 64**0.5 * 0.6
    stated = kernel(x, y, errors, upstream=1.0, samples=1024, **VARS)
    for k in range(2):
        assert 0.6 < stated[k].square().mean().sqrt() / size[2][k] < 1.6


def test_draws_are_gaussian_and_orthogonal() -> None:
    even, odd = draws.standard_draws(64, 3, 0)
    assert even.shape == odd.shape == (64, 2, 3, 3)
    flat = even.flatten(1)  # 18 columns, orthogonal up to the norms of the rows
    cross, plain = (v.mT @ v / 64 - torch.eye(18) for v in (flat, torch.randn(64, 18, dtype=torch.float64)))
    assert cross.norm() < plain.norm() / 3
    larger = draws.standard_draws(64, 5, 0)
    torch.testing.assert_close(larger[0][..., :3, :3], even)
    torch.testing.assert_close(larger[1][..., :3, :3], odd)
    many = torch.cat(draws.standard_draws(3000, 4, 1)).flatten()
    assert abs(many.mean()) < 0.02
    assert abs(many.var() - 1) < 0.02
    assert abs((many**4).mean() - 3) < 0.1


def test_one_position_is_two_linear_layers() -> None:
    x, y = inputs(3, 1), inputs(2, 1, seed=1)
    cov = moments(x, y)
    theta, ov = cov + cov**3, VARS["o_var"] * VARS["v_var"]
    options = {"biases": (0.3, 0.2, 0.5, 0.7), "samples": 8, "rates": (1, 1, 0.5, 2.0), **VARS}
    nngp = VARS["o_var"] * (VARS["v_var"] * cov + 0.5) + 0.7
    ntk = ov * theta + 0.5 * ov * cov + VARS["o_var"] * 0.5 + 2 * (nngp - 0.7) + 0.7
    close(kernel(x, y, upstream=1.0, **options), (nngp, ntk), 1e-12)


def test_equal_scores_are_a_mean_over_positions() -> None:
    x, y = inputs(2, 4), inputs(3, 4, seed=1)
    keys = torch.tensor([[True, True, True, False], [True, True, True, True]])
    cov, mean = moments(x, y), keys / keys.double().sum(1, keepdim=True)
    options = {"q_var": 0.0, "k_var": 1.0, "v_var": 1.2, "o_var": 0.7, "samples": 8, "mask1": keys}
    nngp, ntk = kernel(x, y, upstream=1.0, **options)
    pooled, theta = (0.84 * torch.einsum("nu,nmuv->nm", mean, v) / 4 for v in (cov, cov + cov**3))
    want = torch.stack([pooled, theta + 2 * pooled])[..., None, None].expand(2, 2, 3, 4, 4)
    close((nngp, ntk), want, 1e-12)
    alike, other = (v[:, :1].expand(-1, 4, -1) for v in (x, y))  # equal tokens: attention does not matter
    cov = 0.84 * moments(alike, other)
    theta = 0.84 * (moments(alike, other) + moments(alike, other) ** 3)
    close(kernel(alike, other, upstream=1.0, samples=8, **VARS), (cov, theta + 2 * cov), 1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_exchange_of_samples_transposes(causal: bool) -> None:
    options = {"upstream": 1.0, "samples": 64, "causal": causal, "biases": (0.3, 0.0, 0.1, 0.0), **VARS}
    x, y = inputs(3, 4), inputs(2, 5, seed=1)
    close(kernel(x, y, **options), [v.permute(1, 0, 3, 2) for v in kernel(y, x, **options)])
    mask1, mask2 = torch.ones(3, 4, dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool)
    mask1[0, 2:] = mask2[1, 3:] = False
    there = kernel(x, y, mask1=mask1, mask2=mask2, **options)
    close(there, [v.permute(1, 0, 3, 2) for v in kernel(y, x, mask1=mask2, mask2=mask1, **options)])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_own_is_the_pair_of_a_sample_with_itself(causal: bool, masked: bool) -> None:
    x = inputs(3, 6)  # more positions than channels: a singular covariance
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 4:] = False
    options = {"samples": 64, "causal": causal, "biases": (0.3, 0.0, 0.1, 0.0), **VARS}
    both = {"mask1": mask, "mask2": mask} if masked else {}
    every = kernel(x, x, upstream=1.0, **both, **options)
    cov = own_moments(x)
    alone = own(cov, cov + cov**3, mask=mask if masked else None, **options)
    close(alone, diagonal(every), 1e-7)
    close(softmax(cov, cov + cov**3, cov, cov, **both, **options), diagonal(every))
    for v in alone:
        torch.testing.assert_close(v, v.mT)


def test_padding_changes_nothing() -> None:
    x, y = inputs(2, 3), inputs(2, 4, seed=1)
    options = {"samples": 64, "biases": (0.3, 0.0, 0.1, 0.0), "upstream": 1.0, **VARS}
    short = kernel(x, y, **options)
    longer = torch.cat([x, inputs(2, 4, seed=7)], 1)
    mask = torch.arange(7).expand(2, -1) < 3
    padded = kernel(longer, y, mask1=mask, **options)
    close(short, [v[:, :, :3] for v in padded])
    both = kernel(longer, longer, mask1=mask, mask2=mask, **options)
    close(kernel(x, x, **options), [v[:, :, :3, :3] for v in both], 1e-7)
    close(kernel(x, y, **options), kernel(x, y, mask1=mask[:, :3], mask2=torch.ones(2, 4, dtype=torch.bool), **options))


def test_causal_looks_back_only() -> None:
    x = inputs(2, 4)
    nngp, ntk = kernel(x, x, samples=16, causal=True, **VARS)
    cov = VARS["o_var"] * VARS["v_var"] * moments(x, x)
    torch.testing.assert_close(nngp[..., 0, 0], cov[..., 0, 0])
    torch.testing.assert_close(ntk[..., 0, 0], 2 * cov[..., 0, 0])
    changed = torch.cat([x[:, :3], inputs(2, 1, seed=5)], 1)
    options = {"samples": 2048, "causal": True, **VARS}
    a, b = kernel(x, x, **options), kernel(changed, changed, **options)
    error = kernel(x, x, errors, **options)
    for k in range(2):
        gap = (a[k] - b[k])[..., :3, :3]
        assert (gap.abs() <= 6 * error[k][..., :3, :3] + 1e-9).all()  # 6: eight repeats know an error to a quarter
        assert (a[k] - b[k])[..., 3, 3].abs().max() > 0.05


def test_positions_can_be_permuted() -> None:
    x, y = inputs(2, 4), inputs(2, 4, seed=1)
    order = torch.tensor([2, 0, 3, 1])
    options = {"samples": 2048, "upstream": 1.0, **VARS}
    there = kernel(x[:, order], y, **options)
    error = kernel(x, y, errors, **options)
    for a, b, e in zip(kernel(x, y, **options), there, error, strict=True):
        assert ((a[:, :, order] - b).abs() < 8 * e[:, :, order]).all()
        assert e.max() < 0.05 * a.abs().max()


def test_positive_up_to_the_error() -> None:
    x = inputs(4, 4)
    options = {"samples": 1024, "upstream": 1.0, **VARS}
    error = kernel(x, x, errors, **options)
    for v, e in zip(kernel(x, x, **options), error, strict=True):
        flat, noise = (u.transpose(1, 2).reshape(16, 16) for u in (v, e))
        torch.testing.assert_close(flat, flat.mT, rtol=1e-8, atol=1e-8)
        assert torch.linalg.eigvalsh(flat)[0] > -3 * noise.max() * 16**0.5


def test_same_bits_for_the_same_seed_and_no_matter_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = inputs(3, 4), inputs(2, 4, seed=1)
    options = {"samples": 100, "upstream": 1.0, **VARS}
    first = kernel(x, y, **options)
    draws.standard_draws.cache_clear()
    torch.manual_seed(7)
    close(first, kernel(x, y, **options), 0.0)
    assert not torch.equal(first[0], kernel(x, y, **(options | {"seed": 1}))[0])
    close([v[1:, :1] for v in first], kernel(x[1:], y[:1], **options), 1e-12)
    monkeypatch.setattr(draws, "ENTRIES", 300)
    close(first, kernel(x, y, **options), 1e-12)


def test_single_precision_and_imperfect_covariances() -> None:
    x, y = inputs(2, 4), inputs(2, 4, seed=1)
    exact = kernel(x, y, upstream=1.0, samples=64, **VARS)
    single = kernel(x.float(), y.float(), upstream=1.0, samples=64, **VARS)
    assert single[1].dtype == torch.float32
    close(exact, [v.double() for v in single], 1e-4)
    bent = moments(x, y) + 1e-3 * torch.randn(2, 2, 4, 4, dtype=torch.float64)  # as sampled layers below leave it
    found = softmax(bent, None, own_moments(x), own_moments(y), samples=64, **VARS)[0]
    torch.testing.assert_close(found, exact[0], rtol=0, atol=0.02)


def test_refusals() -> None:
    x = inputs(2, 3)
    with pytest.raises(InputError, match="samples=2; needed: at least 4"):
        kernel(x, x, samples=2, **VARS)
    with pytest.raises(InputError, match="finite numbers ≥ 0"):
        kernel(x, x, samples=8, **(VARS | {"q_var": -1.0}))
    with pytest.raises(InputError, match="a mask is torch.float64"):
        kernel(x, x, samples=8, mask1=torch.ones(2, 3, dtype=torch.float64), **VARS)
    with pytest.raises(InputError, match="without any key"):
        kernel(x, x, samples=8, mask1=torch.tensor([[True, False, False], [False, False, False]]), **VARS)
    with pytest.raises(InputError, match="have the shapes"):
        softmax(moments(x, x), None, own_moments(x), own_moments(x[:, :2]), samples=8, **VARS)
    with pytest.raises(InputError, match="mechanism='tanh'; needed: one of"):
        kernel(x, x, partial(closed_form, "tanh"), qk_var=1.0, ov_var=1.0)
