"""Which training samples made a decision: A(x, x_i)^c = W_ci κ(x, x_i) + b_c / N, so that Σ_i A is the logit.

The same holds for every kernel machine here: a surrogate, logistic regression, and regression, whose coefficients are
the representer weights (there is no bias, and where a model starts from f₀, Σ_i A = f − f₀). Yeh et al. 2018; Engel et
al. 2024, (3).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.memory import ATTRIBUTIONS
from .._base.progress import bar
from .._base.results import Result
from .._base.types import Array, Float, Int
from ..errors import InputError
from ..gram.gram import Gram
from ..linalg.matrix import Matrix, between
from ..regress.logistic_loss import LogisticModel
from ..regress.model import KernelModel
from ..surrogate.model import Surrogate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Model = Surrogate | LogisticModel | KernelModel
# Whiskers reach the last sample within this many quartile ranges of the box (Tukey 1977).
WHISKERS = 1.5


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Result):
    """Attributions of m decisions, each to q of its logits, summarised over N training samples of t classes.

    `outputs`: which logits. `totals`: Σ_i A, the model's logit. `boxes`: of A over the training samples of each class:
    lower whisker, lower quartile, median, upper quartile, upper whisker, mean; whiskers reach the last sample within
    1.5 quartile ranges (Tukey). `outliers`: how many lie beyond; `fliers`: the f farthest of these, padded with NaN.
    `similar`: the k training samples with the largest κ. `helpful` and `harmful`: those that raise and lower the logit
    most, in order, with A in `help` and `harm`.
    """

    outputs: Int[Tensor, "m q"]
    totals: Float[Tensor, "m q"]
    boxes: Float[Tensor, "m q t 6"]
    outliers: Int[Tensor, "m q t"]
    fliers: Float[Tensor, "m q t f"]
    similar: Int[Tensor, "m k"]
    similarity: Float[Tensor, "m k"]
    helpful: Int[Tensor, "m q k"]
    help: Float[Tensor, "m q k"]
    harmful: Int[Tensor, "m q k"]
    harm: Float[Tensor, "m q k"]

    def cpu(self) -> "Attribution":
        """The same, in the machine's memory."""
        return Attribution(**{f.name: getattr(self, f.name).cpu() for f in fields(self)})

    def plot(self, decision: int = 0, names: Sequence[str] | None = None) -> "Figure":
        """A figure: box plots of one decision's attributions by class, for each of its logits. `names`: of classes."""
        from ..plots import draw_attribution

        return draw_attribution(self, decision, names)

    def words(
        self, decision: int, output: int, y: Tensor, classes: Sequence[str], *, similarity: Tensor | None = None
    ) -> str:
        """The training samples behind one decision, by number with their class, a line each for and against it.

        `output`: which logit; `y`, `classes`: the training samples' labels and their names. `similarity`: what is said
        of the `similar` ones, [m, k] (default: κ).
        """
        alike = self.similarity if similarity is None else similarity
        (logit,) = (self.outputs[decision] == output).nonzero()[:, 0].tolist()

        def listed(who: Tensor, values: Tensor, form: str) -> str:
            """Numbers of samples, each with its class and value."""
            pairs = zip(who.tolist(), values.tolist(), strict=True)
            return ", ".join(f"{i} ({classes[int(y[i])]}, {v:{form}})" for i, v in pairs)

        lines = {
            f"for {classes[output]}": listed(self.helpful[decision, logit], self.help[decision, logit], "+.2f"),
            f"against {classes[output]}": listed(self.harmful[decision, logit], self.harm[decision, logit], "+.2f"),
            "most like it": listed(self.similar[decision], alike[decision], ".2f"),
        }
        width = max(map(len, lines))
        return "\n".join(f"  {what:>{width}}: {who}" for what, who in lines.items())

    def __repr__(self) -> str:
        (m, q), k = self.outputs.shape, self.similar.shape[1]
        return f"Attribution({m} decisions, {q} logits each, {self.boxes.shape[2]} classes, {k} nearest)"


def attributions(model: Model, cross: Matrix, outputs: Array | None = None) -> Float[Tensor, "m q n"]:
    """A(x, x_i)^c = W_ci κ(x, x_i) + b_c / N, for m samples whose Gram with the N training samples is `cross` [m, N].

    `model`: fitted on a Gram (not through features). `outputs`: which logits of each, [m, q] (default: all). Cost:
    m·q·N numbers; `summarize` holds few at a time.

    >>> import tangency as tg
    >>> x, y = torch.randn(60, 3).double(), torch.randint(3, (60,))
    >>> fit = tg.surrogate.fit(x @ x.T, y)
    >>> cross = torch.randn(5, 3).double() @ x.T
    >>> torch.allclose(attributions(fit, cross).sum(-1), fit.logits(cross))
    True
    """
    gram, terms = _checked(model, cross)
    return terms.of_rows(gram.dense(), _outputs(outputs, gram.shape[0], terms))


def summarize(
    model: Model,
    cross: Matrix,
    *,
    outputs: Array | None = None,
    labels: Array | None = None,
    classes: int | None = None,
    neighbours: int = 8,
    fliers: int = 8,
    memory: int | str = ATTRIBUTIONS,
    progress: bool = True,
) -> Attribution:
    """Box plots by class, outliers, the most similar, helpful and harmful training samples of each decision.

    `cross` [m, N] may lie on disk; it is read by bands of rows that take about `memory`. `outputs`: which logits,
    [m, q] (default: all). `labels`: the classes of the training samples (default: one box for all). `neighbours`,
    `fliers`: how many training samples are listed, and outliers of each box kept.

    >>> import tangency as tg
    >>> x, y = torch.randn(60, 3).double(), torch.randint(3, (60,))
    >>> fit = tg.surrogate.fit(x @ x.T, y)
    >>> tg.decisions.summarize(fit, torch.randn(5, 3).double() @ x.T, labels=y, neighbours=3)
    Attribution(5 decisions, 3 logits each, 3 classes, 3 nearest)
    """
    gram, terms = _checked(model, cross)
    m, n = gram.shape
    groups = _groups(labels, classes, n, terms.bias.device)
    chosen = _outputs(outputs, m, terms)
    for name, value, most in (("neighbours", neighbours, n), ("fliers", fliers, None)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
            raise InputError(f"{name}={value!r}; needed: a whole number from 1" + (f" to {most}." if most else "."))
    budget = checks.memory(memory) or 1
    # Of a row: κ and its widened copy, and for each logit A, A in order, and what sorting takes; 8 bytes a number.
    rows = max(1, budget // (8 * n * (3 * chosen.shape[1] + 2)))
    parts: list[Attribution] = []
    with bar(m, "attributions", "sample", show=progress) as step:
        for start in range(0, m, rows):
            block = gram[start : start + rows]
            parts.append(_summary(terms, block, chosen[start : start + rows], groups, neighbours, fliers))
            step(len(block))
    return Attribution(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Attribution)})


@dataclass(frozen=True, eq=False)
class _Terms:
    """What the terms of a kernel machine are made of: Wᵀ [N, c] and b [c]."""

    coefficients: Tensor
    bias: Tensor

    @staticmethod
    def of(model: Model) -> "_Terms":
        """Those of any kernel machine with one similarity for each pair of samples."""
        if isinstance(model, Surrogate):
            return _Terms(model.coefficients, model.bias)
        core, bias = (model.model, model.bias) if isinstance(model, LogisticModel) else (model, None)
        if core.full:
            raise InputError(
                "the model has a full kernel, whose samples act on all outputs at once; attributions need one "
                "similarity for each pair of samples: fit with tg.trace_ntk, tg.pseudo_ntk, …"
            )
        columns = core.coefficients if core.coefficients.dim() == 2 else core.coefficients[:, None]
        return _Terms(columns, columns.new_zeros(columns.shape[1]) if bias is None else bias.reshape(-1))

    def of_rows(self, kernel: Tensor, outputs: Tensor) -> Tensor:
        """A [b, q, N] for rows [b, N] of κ."""
        wide = torch.promote_types(kernel.dtype, self.coefficients.dtype)
        w, b, k = self.coefficients.to(wide), self.bias.to(wide), kernel.to(self.bias.device, wide)
        # The bias is shared out evenly, so that the terms of a decision sum to its logit.
        return w.T[outputs] * k[:, None] + (b[outputs] / len(w))[..., None]


def _checked(model: Model, cross: Matrix) -> tuple[Gram, _Terms]:
    """The Gram [m, N] and the model's terms, which must be of the same N samples and on the same device."""
    if not isinstance(model, (Surrogate, LogisticModel, KernelModel)):
        raise InputError(
            f"model is a {type(model).__name__}; needed: what tg.surrogate.fit, tg.regress.logistic or "
            "tg.regress.ridge returns."
        )
    gram, terms = between(cross), _Terms.of(model)
    n = len(terms.coefficients)
    if len(gram.shape) != 2 or gram.shape[1] != n or not gram.shape[0]:
        raise InputError(
            f"cross has shape {tuple(gram.shape)}; needed: new samples by the {n} training samples, [m, {n}]: "
            "tg.compute(kernel, x_new, x_train)."
        )
    # A Gram on disk has no device; its rows are brought to the model's.
    if gram.device is not None:
        checks.beside(terms.bias, gram.device, "the model", "cross")
    return gram, terms


def _outputs(outputs: Array | None, m: int, terms: _Terms) -> Tensor:
    """Which logits of each sample are explained, [m, q]; all if that is not said."""
    c = len(terms.bias)
    if outputs is None:
        return torch.arange(c, device=terms.bias.device).expand(m, c)
    chosen = tree.numbers(outputs, "outputs")
    if chosen.dim() != 2 or len(chosen) != m or not chosen.shape[1] or chosen.is_floating_point():
        raise InputError(f"outputs has shape {tuple(chosen.shape)}, {chosen.dtype}; needed: whole numbers [{m}, q].")
    if int(chosen.min()) < 0 or int(chosen.max()) >= c:
        raise InputError(f"outputs goes from {int(chosen.min())} to {int(chosen.max())}; needed: from 0 to {c - 1}.")
    return chosen.long().to(terms.bias.device)


def _groups(labels: Array | None, classes: int | None, n: int, device: torch.device) -> list[Tensor]:
    """Numbers of the training samples of each class."""
    if labels is None:
        return [torch.arange(n, device=device)]
    y = tree.numbers(labels, "labels")
    if y.shape != (n,) or y.is_floating_point():
        raise InputError(f"labels has shape {tuple(y.shape)}, {y.dtype}; needed: a class for each of the {n} samples.")
    y = y.to(device)
    count = classes or int(y.max()) + 1
    if int(y.min()) < 0 or int(y.max()) >= count:
        raise InputError(f"labels has classes from {int(y.min())} to {int(y.max())}; needed: from 0 to {count - 1}.")
    groups = [(y == t).nonzero()[:, 0] for t in range(count)]
    empty = [str(t) for t, g in enumerate(groups) if not len(g)]
    if empty:
        raise InputError(f"labels has no sample of class {checks.some(empty)} (of {count}), so there is no box for it.")
    return groups


def _summary(terms: _Terms, kernel: Tensor, outputs: Tensor, groups: list[Tensor], k: int, fliers: int) -> Attribution:
    """Of a band of rows κ [b, N]."""
    # Before anything is sorted: NaN would count as the largest.
    checks.finite(kernel, "cross")
    kernel = kernel.to(terms.bias.device)
    a = terms.of_rows(kernel, outputs)
    boxes, outliers, far = (torch.stack(p, 2) for p in zip(*(_box(a[..., g], fliers) for g in groups), strict=True))
    similarity, similar = kernel.topk(k)
    most, least = a.topk(k), a.topk(k, largest=False)
    return Attribution(
        outputs, a.sum(-1), boxes, outliers, far, similar, similarity,
        most.indices, most.values, least.indices, least.values,
    )  # fmt: skip


def _box(a: Tensor, fliers: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whiskers, quartiles, median and mean of [b, q, n] over n, [b, q, 6]; how many lie beyond; the farthest."""
    ordered = a.sort(-1).values
    n = ordered.shape[-1]
    # Quartiles are linear between samples, as numpy's and matplotlib's.
    at = torch.tensor([0.25, 0.5, 0.75], dtype=a.dtype, device=a.device) * (n - 1)
    below = at.floor().long()
    quartiles = torch.lerp(ordered[..., below], ordered[..., (below + 1).clamp_max(n - 1)], at - below)
    low, _, high = quartiles.unbind(-1)
    reach = WHISKERS * (high - low)
    # The first and the last sample within reach, [b, q, 1].
    first = torch.searchsorted(ordered, (low - reach)[..., None].contiguous())
    last = torch.searchsorted(ordered, (high + reach)[..., None].contiguous(), right=True) - 1
    ends = [ordered.gather(-1, end.clamp(0, n - 1)) for end in (first, last)]
    # With few samples a quartile may lie beyond the last one within reach: a whisker never ends inside its box.
    tips = [torch.minimum(ends[0], low[..., None]), torch.maximum(ends[1], high[..., None])]
    boxes = torch.cat([tips[0], quartiles, tips[1], a.mean(-1, keepdim=True)], -1)
    # A class may have fewer samples than fliers are asked for: the rest is padded, so that classes can be stacked.
    f = min(fliers, n)
    tails = torch.cat([ordered[..., :f], ordered[..., n - f :]], -1)  # the farthest are among these
    beyond = torch.maximum(ends[0] - tails, tails - ends[1])
    if 2 * f > n:  # the two tails overlap: count nothing twice
        beyond[..., f : 3 * f - n] = 0
    far = beyond.topk(f, -1)
    values = torch.where(far.values > 0, tails.gather(-1, far.indices), torch.nan)
    pad = values.new_full((*values.shape[:-1], fliers - f), torch.nan)
    return boxes, (first + n - 1 - last)[..., 0], torch.cat([values, pad], -1)
