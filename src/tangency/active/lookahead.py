"""What a kernel machine would say if a sample had a label: exactly, for all candidates at once, without fitting again.

A machine f(x) = f₀(x) + k(x, X) (K + reg)⁻¹ (y − f₀) that has seen X leaves the covariance
c(x, z) = k(x, z) − k(x, X) (K + reg)⁻¹ k(X, z). With a further sample z and its target t it is

    f⁺(x) = f(x) + c(x, z) (c(z, z) + reg)⁻¹ (t − f(z)),

to the last digit what fitting to both gives (the Schur complement of a row more). With K + reg = L Lᵀ what is needed is
L⁻¹ k(X, ·), to which a further sample adds a row.

Mohamadi, Bae & Sutherland 2022, "Making look-ahead active learning strategies feasible with neural tangent kernels".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .._base import checks, tree
from .._base.memory import BATCH_ON_CPU, free_memory
from .._base.results import Result
from .._base.targets import by_name, column, read_targets
from .._base.types import Array, Float, Int, Memory, Numbers
from ..datasets.accepted import whole
from ..errors import InputError, NotPositiveDefinite
from ..gram.gram import Gram
from ..linalg.factor import factor
from ..linalg.matrix import Matrix, flattened, square

Indices = Sequence[int] | Array
Measure = Literal["norm", "classes"]
# reg by default, beside the mean of K's diagonal (heuristic).
REG = 1e-2
# Samples of a full kernel that are read at a time for their own blocks (heuristic).
OWN = 64


@dataclass(frozen=True, eq=False, repr=False)
class LookAhead(Result):
    """A kernel machine over the samples of K, of which some have labels, and what further labels would do to it.

    `outputs`: f on all samples of K, [n, c]. `labelled`: which have labels, in the order in which they came.
    """

    gram: Gram = field(repr=False)
    labelled: Int[Tensor, " m"]
    reg: float
    outputs: Float[Tensor, "n c"]
    prior: Float[Tensor, "n b b"] = field(repr=False)  # k(z, z) of each sample
    half: Float[Tensor, "r s"] = field(repr=False)  # L⁻¹ k(X, ·) over all samples (times outputs, for a full kernel)
    budget: int = field(repr=False)  # bytes of what is held of the covariance

    @property
    def block(self) -> int:
        """Rows of K that a sample has: its outputs for a full kernel, else 1, and every output has the same kernel."""
        return self.prior.shape[1]

    @property
    def candidates(self) -> Int[Tensor, " u"]:
        """The samples without a label."""
        free = torch.ones(len(self.outputs), dtype=torch.bool, device=self.outputs.device)
        free[self.labelled] = False
        return free.nonzero()[:, 0]

    def covariance(self, rows: Indices, columns: Indices) -> Float[Tensor, "i j"]:
        """c(x, z) = k(x, z) − k(x, X) (K + reg)⁻¹ k(X, z), flat over the outputs of a full kernel.

        Cost: labels · rows · columns multiply–adds.
        """
        i, j = self.places(rows, "rows"), self.places(columns, "columns")
        prior = flattened(self.gram.select(i.cpu(), j.cpu()), self.half.dtype, self.half.device)
        return prior.addmm_(self._half(i).T, self._half(j), alpha=-1)

    def add(self, index: Indices, targets: Numbers) -> "LookAhead":
        """The machine that has seen these samples too, the same as if it had been fitted to all.

        `targets`: classes [k], or what each sample's outputs should be [k, c]. Cost: k · labels · n.

        >>> import tangency as tg
        >>> x = torch.randn(30, 4).double()
        >>> ahead = tg.active.look_ahead(x @ x.T, [0, 1, 2], [0, 1, 1])
        >>> more, again = ahead.add([7, 5], [0, 1]), tg.active.look_ahead(x @ x.T, [0, 1, 2, 7, 5], [0, 1, 1, 0, 1])
        >>> torch.allclose(more.outputs, again.outputs)
        True
        """
        i = self.places(index, "index")
        without_repeats(i, "index")
        again = i[torch.isin(i, self.labelled)]
        if len(again):
            raise InputError(f"sample {int(again[0])} has a label already. Leave it out, or begin anew without it.")
        c = self.outputs.shape[1]
        t = wanted_outputs(targets, len(i), c).to(self.outputs)
        everything = torch.arange(len(self.outputs), device=i.device)
        new = self.covariance(i, everything)  # [k·b, n·b]
        own = new[:, self.flat(i)]
        lower = self._lower(own[None], i[None])[0]
        rows = torch.linalg.solve_triangular(lower, new, upper=False)  # the rows that L⁻¹ k(X, ·) gains
        # f⁺ − f = C (C_zz + reg)⁻¹ (t − f(z)), and the rows' products are the first two of the three.
        missing = torch.linalg.solve_triangular(
            lower, (t - self.outputs[i]).reshape(len(own), c // self.block), upper=False
        )
        step = rows.T @ missing
        outputs = self.outputs + step.reshape(self.outputs.shape)
        return replace(self, labelled=torch.cat([self.labelled, i]), half=torch.cat([self.half, rows]), outputs=outputs)

    def after(self, index: Indices, targets: Numbers, on: Indices | None = None) -> Float[Tensor, "k m c"]:
        """f⁺ on the samples `on` (default: all), had each of these samples, one at a time, its target.

        `targets` as for `add`, which takes several samples at once. Takes k·m·c numbers.
        """
        i = self.places(index, "index")
        m = self.places(on, "on") if on is not None else torch.arange(len(self.outputs), device=i.device)
        t = wanted_outputs(targets, len(i), self.outputs.shape[1]).to(self.outputs)
        gain = self._gain(self.covariance(m, i), i)
        return self.outputs[m] + self._moves(gain, t - self.outputs[i])

    def changes(
        self, candidates: Indices | None = None, on: Indices | None = None, *, measure: Measure = "norm"
    ) -> Float[Tensor, "u c"]:
        """Σ_x ‖f⁺(x) − f(x)‖ over the samples `on`, had a candidate the class of the column; for all at once.

        By default all samples without a label are candidates, and changes are counted on the candidates. `measure`:
        "norm", or "classes", the number of samples whose largest output becomes another. Cost: labels · u · m
        multiply–adds, and c · u · m more for "classes"; memory: bounded, by blocks of candidates.

        >>> import tangency as tg
        >>> x = torch.randn(30, 4).double()
        >>> tg.active.look_ahead(x @ x.T, [0, 1, 2], [0, 1, 2]).changes().shape
        torch.Size([27, 3])
        """
        return self._scores(candidates, on, measure, None)

    def most_likely_change(
        self, candidates: Indices | None = None, on: Indices | None = None, *, measure: Measure = "norm"
    ) -> Float[Tensor, " u"]:
        """`changes` by the class that the machine finds likeliest, its largest output (the paper's MLMOC)."""
        u = self.candidates if candidates is None else self.places(candidates, "candidates")
        return self._scores(u, on, measure, self.outputs[u].argmax(1, keepdim=True))[:, 0]

    def expected_change(
        self,
        probabilities: Numbers,
        candidates: Indices | None = None,
        on: Indices | None = None,
        *,
        measure: Measure = "norm",
    ) -> Float[Tensor, " u"]:
        """Σ_c p_c(z) · `changes`(z, c), for the probabilities of the classes of all samples of K."""
        u = self.candidates if candidates is None else self.places(candidates, "candidates")
        return (self._scores(u, on, measure, None) * self.weights(probabilities)[u]).sum(1)

    def weights(self, probabilities: Numbers) -> Float[Tensor, "n c"]:
        """Probabilities of the classes of all samples of K, looked at and where the machine is."""
        p = tree.numbers(probabilities, "probabilities")
        if p.shape != self.outputs.shape:
            raise InputError(
                f"probabilities have shape {tuple(p.shape)}; needed: {tuple(self.outputs.shape)}, a row "
                "for each sample of K."
            )
        checks.finite(p, "probabilities")
        if bool((p < 0).any()):
            raise InputError("some probabilities are below 0; needed: those of the classes, softmax of logits.")
        return p.to(self.outputs)

    def _scores(
        self, candidates: Indices | None, on: Indices | None, measure: Measure, classes: Tensor | None
    ) -> Float[Tensor, "u q"]:
        """The change by each of the `classes` [u, q] of each candidate, by default all of them."""
        checks.choice(measure, "measure", get_args(Measure))
        u = self.candidates if candidates is None else self.places(candidates, "candidates")
        m = u if on is None else self.places(on, "on")
        return self.score(u, m, measure, classes)

    def score(
        self, u: Tensor, m: Tensor, measure: Measure, classes: Tensor | None, covariance: Tensor | None = None
    ) -> Float[Tensor, "u q"]:
        """The change on samples m by each of the `classes` [u, q] (default: all) of each sample u, by parts of these.

        `covariance`: that of m with u, where somebody holds it.
        """
        b, c = self.block, self.outputs.shape[1]
        if c < 2:
            raise InputError(
                "the machine has one output, so there is no other class to become. Give classes as whole numbers: "
                "look_ahead(K, labelled, y.long()); of real targets ask after(index, targets)."
            )
        if classes is None:
            classes = torch.arange(c, device=u.device).expand(len(u), c)
        # Of a candidate: its covariance, its gain and temporaries; its moves too, where they are made.
        moves = 3 * c if measure == "classes" or b > 1 else 0
        step = max(1, self.budget // (8 * max(1, len(m)) * (3 * b * b + moves)))
        found = [self.outputs.new_zeros(0, classes.shape[1])]
        for k in range(0, len(u), step):
            part = slice(k, k + step)
            here = self.covariance(m, u[part]) if covariance is None else covariance[:, k * b : (k + step) * b]
            found.append(self._change_by(here, u[part], m, classes[part], measure))
        return torch.cat(found)

    def _change_by(
        self, covariance: Tensor, u: Tensor, m: Tensor, classes: Tensor, measure: Measure
    ) -> Float[Tensor, "u q"]:
        """The change on samples m by each class [u, q] of each sample u, from the covariance of m with u."""
        missing = [F.one_hot(k, self.outputs.shape[1]).to(self.outputs) - self.outputs[u] for k in classes.T]
        if measure == "norm" and self.block == 1:  # ‖c(x, z) r‖ = |c(x, z)| ‖r‖: nothing is made for each sample
            reach = torch.linalg.vector_norm(covariance, 1, dim=0) / self._left(u).square().flatten()
            return torch.stack([reach * r.norm(dim=1) for r in missing], 1)
        gain, was, columns = self._gain(covariance, u), self.outputs[m].argmax(1), list[Tensor]()
        for r in missing:
            moves = self._moves(gain, r)
            if measure == "norm":
                columns.append(moves.norm(dim=2).sum(1))
            else:
                columns.append(((self.outputs[m] + moves).argmax(2) != was).sum(1).to(self.outputs))
        return torch.stack(columns, 1)

    def _gain(self, covariance: Tensor, index: Tensor) -> Float[Tensor, "u w b"]:
        """C_xz (C_zz + reg)⁻¹, from the covariance [m·b, u·b] with these samples."""
        by_candidate = covariance.reshape(len(covariance), len(index), self.block).transpose(0, 1)
        lower = self._left(index)
        if self.block == 1:
            return by_candidate / lower.square()
        return torch.cholesky_solve(by_candidate.mT, lower).mT

    def _left(self, index: Tensor) -> Float[Tensor, "u b b"]:
        """L with L Lᵀ = c(z, z) + reg, of each sample."""
        half = self._half(index)
        if self.block == 1:
            return self._lower(self.prior[index] - half.square().sum(0)[:, None, None], index[:, None])
        half = half.reshape(len(half), len(index), self.block)
        return self._lower(self.prior[index] - torch.einsum("rub,ruc->ubc", half, half), index[:, None])

    def _lower(self, own: Tensor, index: Tensor) -> Float[Tensor, "u k k"]:
        """L with L Lᵀ = C_zz + reg, for groups of samples [u, k]; refused where nothing but rounding is left of it."""
        shifted = own + self.reg * torch.eye(own.shape[1], dtype=own.dtype, device=own.device)
        if shifted.shape[1] == 1:
            lower, info = shifted.clamp_min(0).sqrt(), torch.zeros(len(shifted), device=own.device)
        else:
            lower, info = torch.linalg.cholesky_ex(shifted)
        before = self.prior.diagonal(dim1=1, dim2=2)[index].flatten(1) + self.reg
        # Rounding leaves of a pivot about as much as of the sum that it is made of (heuristic: 30·√n·ε).
        least = 30 * (len(self.half) + 1) ** 0.5 * torch.finfo(own.dtype).eps * before
        bad = (info > 0) | ~(lower.diagonal(dim1=1, dim2=2).square() > least).all(1)
        if bool(bad.any()):
            which = index[int(bad.nonzero()[0])].tolist()
            raise NotPositiveDefinite(
                f"sample{'s' * (len(which) > 1)} {checks.some([str(k) for k in which])} repeat what the samples with "
                "labels say, to the digits that there are (copies, or more samples than features), and "
                f"reg={self.reg:g} does not part them. Give a larger reg (a start: "
                f"{1e-6 * float(self.prior.abs().max()):.1g})."
            )
        return lower

    def _moves(self, gain: Tensor, missing: Tensor) -> Float[Tensor, "u m c"]:
        """f⁺ − f from gains [u, m·b, b] and t − f(z) [u, c]."""
        (u, c), b = missing.shape, self.block
        return (gain @ missing.reshape(u, b, c // b)).reshape(u, gain.shape[1] // b, c)

    def _half(self, index: Tensor) -> Tensor:
        return self.half[:, self.flat(index)]

    def flat(self, index: Tensor) -> Tensor:
        """Rows of K, with its outputs flat, of these samples."""
        b = self.block
        return index if b == 1 else (index[:, None] * b + torch.arange(b, device=index.device)).flatten()

    def places(self, given: Indices, name: str) -> Int[Tensor, " k"]:
        """Numbers of samples of K, looked at and where the machine is."""
        return places(given, len(self.outputs), name).to(self.outputs.device)


def look_ahead(
    K: Matrix,
    labelled: Indices,
    targets: Numbers,
    *,
    classes: int | None = None,
    reg: float | None = None,
    f0: Numbers | None = None,
    memory: Memory = None,
) -> LookAhead:
    """f(x) = f₀(x) + k(x, X) (K + reg)⁻¹ (y − f₀), ready to be asked what further labels would change.

    `K`: the Gram of all samples, with labels and without, of any kernel: [n, n], the same for every output, or full
    [n, c, n, c]. `labelled`: the numbers of those with labels; `targets`: their classes, or real outputs [m, c]. `f0`:
    outputs of all samples that the machine starts from, [n, c], such as those of the network whose NTK this is.
    `reg`: default 1 % of the mean of K's diagonal. `memory`: what may be held of the covariance at a time (default: 512
    MiB, a third of what a GPU has free). Float64 inside. Mohamadi, Bae & Sutherland 2022.
    Cost: m³/3 + m²·n, and m·n numbers, for m labels.

    >>> import tangency as tg
    >>> x = torch.randn(30, 4)
    >>> ahead = tg.active.look_ahead(tg.compute(tg.trace_ntk(tg.models.mlp([4, 8, 2])), x), [0, 1, 2], [0, 1, 1])
    >>> ahead.most_likely_change().argmax() < 27
    tensor(True)
    """
    gram = square(K)
    n, full = gram.shape[0], len(gram.shape) == 4
    device = gram.device or torch.device("cpu")
    index = places(labelled, n, "labelled").to(device)
    without_repeats(index, "labelled")
    if not len(index):
        raise InputError("no sample has a label; needed: at least one. Begin with samples at random.")
    start = None if f0 is None else _starting_outputs(f0, n).to(device, torch.float64)
    given = gram.shape[1] if full else None if start is None else start.shape[1]
    if classes is not None and not whole(classes, 2):
        raise InputError(f"classes={classes!r}; needed: how many there are, a whole number from 2.")
    if classes is not None and given is not None and classes != given:
        raise InputError(f"classes={classes}, and {'the kernel' if full else 'f0'} has {given} outputs; needed: equal.")
    t = wanted_outputs(targets, len(index), classes if given is None else given).to(device, torch.float64)
    if full and t.shape[1] != gram.shape[1]:
        raise InputError(f"the kernel has {gram.shape[1]} outputs and the targets {t.shape[1]}; needed: the same.")
    if start is not None and start.shape[1] != t.shape[1]:
        raise InputError(f"f0 has {start.shape[1]} columns and the targets {t.shape[1]}; needed: the same.")
    begin = t.new_zeros(n, t.shape[1]) if start is None else start
    reg = default_reg(gram) if reg is None else checks.nonnegative(reg, "reg")
    chosen = index.cpu()
    lower = factor(gram.select(chosen, chosen), reg, torch.float64, device)
    half = flattened(gram.select(chosen), torch.float64, device)
    half = torch.linalg.solve_triangular(lower, half, upper=False)
    missing = torch.linalg.solve_triangular(lower, (t - begin[index]).reshape(len(lower), -1), upper=False)
    outputs = begin + (half.T @ missing).reshape(begin.shape)
    budget = checks.memory(memory) or (free_memory(device) // 3 if device.type == "cuda" else BATCH_ON_CPU)
    return LookAhead(gram, index, reg, outputs, _own_blocks(gram).to(device), half, budget)


def default_reg(gram: Gram) -> float:
    """1 % of the mean of the diagonal, so that a multiple of K has the same outputs."""
    return REG * float(gram.diag().double().mean())


def wanted_outputs(targets: Numbers, count: int, classes: int | None) -> Float[Tensor, "k c"]:
    """Classes as rows of 0 and 1, real outputs as they are."""
    if classes is None:
        ask = "If these are classes, give them as integers: targets.long(); if real outputs, as a column: [:, None]."
        given = column(targets)
        t = tree.numbers(given, "targets") if not by_name(given) else read_targets(given, "targets").values
        if t.dim() == 1:
            t = read_targets(t, "targets", ask=ask).values
    else:
        t = tree.numbers(column(targets), "targets")
    if not count and not t.numel():
        return torch.zeros(0, classes or 2, dtype=torch.float64)
    if t.is_complex() or t.dim() not in (1, 2) or len(t) != count:
        raise InputError(f"targets are {t.dtype} of shape {tuple(t.shape)}; needed: {count} classes, or [{count}, c].")
    if t.is_floating_point():
        checks.finite(t, "targets")
        if t.dim() == 1:
            t = t[:, None]
        if classes is not None and t.shape[1] != classes:
            raise InputError(f"targets have {t.shape[1]} columns; needed: {classes}, one for each output.")
        return t.double()
    if t.dim() == 2:
        raise InputError(
            f"targets are integers of shape {tuple(t.shape)}; needed: one class for each sample, [{count}]."
        )
    c = int(t.max()) + 1 if classes is None else classes
    check_classes(t, max(c, 2))
    return F.one_hot(t.long(), max(c, 2)).double()


def check_classes(labels: Tensor, classes: int) -> None:
    """Refuse labels of classes that there are not."""
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise InputError(f"there is a label of class {int(wrong[0])}; needed: classes from 0 to {classes - 1}.")


def places(given: Indices, n: int, name: str) -> Int[Tensor, " k"]:
    """Numbers of samples, from 0 to n − 1."""
    i = tree.numbers(given, name)
    if i.numel() == 0:
        return i.new_zeros(0).long()
    if i.dim() != 1 or i.is_floating_point() or i.is_complex() or i.dtype == torch.bool:
        raise InputError(f"{name} is {i.dtype} of shape {tuple(i.shape)}; needed: numbers of samples, [k].")
    wrong = i[(i < 0) | (i >= n)]
    if len(wrong):
        raise InputError(f"{name} names sample {int(wrong[0])}; needed: numbers from 0 to {n - 1}.")
    return i.long()


def without_repeats(index: Tensor, name: str) -> None:
    """Refuse a sample that is named twice."""
    values, counts = index.unique(return_counts=True)
    if bool((counts > 1).any()):
        raise InputError(f"{name} names sample {int(values[counts > 1][0])} twice; needed: each sample once.")


def _starting_outputs(f0: Numbers, n: int) -> Float[Tensor, "n c"]:
    start = tree.numbers(f0, "f0")
    if start.dim() != 2 or len(start) != n or start.is_complex():
        raise InputError(f"f0 has shape {tuple(start.shape)}; needed: outputs of all samples of K, [{n}, c].")
    checks.finite(start, "f0")
    return start


def _own_blocks(gram: Gram) -> Float[Tensor, "n b b"]:
    """k(z, z) of each sample."""
    if len(gram.shape) == 2:
        return gram.diag().double()[:, None, None]
    parts = [slice(k, k + OWN) for k in range(0, gram.shape[0], OWN)]
    blocks = [gram.select(part, part).dense().diagonal(dim1=0, dim2=2).permute(2, 0, 1) for part in parts]
    return torch.cat(blocks).double()
