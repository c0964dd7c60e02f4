"""Kernel methods as scikit-learn estimators, for its pipelines and searches: `pip install 'tangency[sklearn]'`.

The work is that of `tangency.regress`; here are only scikit-learn's conventions: arrays in and out, labels, tags. A
kernel is a tangency kernel of any module, a function k(X, Y), or "precomputed". Each fit computes its Gram; a search
over `reg` alone does less work on a Gram computed once, with kernel="precomputed", or with reg="loo".

A fit is fixed: it keeps a copy of its samples, and predicting is refused once the kernel is another function than it
was, because its network went on training, say.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ._base import checks, tree
from ._base.extras import needed
from ._base.misfit import misfit
from ._base.types import Inputs, Memory, Spec
from .auditing import Audit, audit_gram
from .engine.network import Network
from .errors import InputError, NotPositiveDefinite
from .gram.compute import compute
from .gram.gram import DenseGram, Gram
from .gram.manifest import differences
from .gram.source import Arrays, Source, source
from .kernels.empirical import Empirical
from .kernels.kernel import Kernel
from .linalg.matrix import square
from .linalg.systems import Solver
from .regress import KernelModel, LogisticModel, cross_validate, logistic, ridge, ridgeless
from .regress.fixed import close, moved, unchanged
from .regress.model import Problem
from .regress.samples import checked_weights

with needed("sklearn", "tangency.estimators"):
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
    from sklearn.svm import SVC
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data

if TYPE_CHECKING:
    from sklearn.utils import Tags

# What `kernel=` may be; a function k(X, Y) takes and returns arrays, or what goes for one.
Choice: TypeAlias = Kernel | Literal["precomputed"] | Callable[..., object]
Reg: TypeAlias = float | Literal["loo", "gcv"]
# Samples in the form that the kernel takes: tensors or a source for ours, an array for a function, a Gram as it is.
Samples: TypeAlias = Inputs | Source | np.ndarray | Gram
CHOICES_OF_REG = ("loo", "gcv")
CLASSIFIER_LOSSES = ("square", "logistic", "svm")
# Training samples whose kernel is computed again for predicting (heuristic).
FEW = 4
# Up to so many new samples one training sample goes along with them; for more a pass of its own costs little.
ALONG = 1024


class _KernelEstimator(BaseEstimator):  # type: ignore[misc]
    """What both estimators share: inputs, Gram matrices, least squares."""

    kernel: Choice
    reg: Reg
    regs: Sequence[float] | None
    solver: Solver | None
    memory: Memory
    kernel_: Choice
    X_fit_: Samples | None  # the training samples, as the kernel takes them; None where the Gram is given
    # What the kernel was: its description, a hash of samples that are not kept, its first rows; None as for X_fit_.
    fixed_: tuple[Spec, str, Tensor] | None
    model_: KernelModel | LogisticModel | SVC

    def __sklearn_tags__(self) -> "Tags":
        """scikit-learn's description of what the estimator takes."""
        tags = super().__sklearn_tags__()
        tags.input_tags.pairwise = isinstance(self.kernel, str)  # folds then take rows and columns
        tags.input_tags.three_d_array = isinstance(self.kernel, Kernel)
        return tags

    def _inputs(self, X: object, fit: bool) -> Samples:
        """X checked, in the form that the kernel takes."""
        kernel = self.kernel if fit else self.kernel_
        if isinstance(kernel, Kernel):
            x = _tensors(kernel, X)
            self._same_features(x, fit)
            return x
        if not callable(kernel) and kernel != "precomputed":
            raise InputError(
                f"kernel={kernel!r}; needed: a tangency kernel (tg.trace_ntk(model)), 'precomputed', or a "
                "function k(X, Y) such as sklearn.metrics.pairwise.rbf_kernel."
            )
        if isinstance(X, Gram) and not callable(kernel):
            if fit:
                self.n_features_in_ = X.shape[1]
            return X
        kind = "numeric" if callable(kernel) else [np.float64, np.float32]
        return validate_data(self, _array(X), reset=fit, dtype=kind, allow_nd=True)

    def _same_features(self, x: Samples, fit: bool) -> None:
        """Rows of real numbers have as many in `predict` as in `fit`; pictures and words may differ in size."""
        many = x.shape[1] if isinstance(x, Tensor) and x.dim() > 1 else None
        if fit:
            if hasattr(self, "n_features_in_"):
                del self.n_features_in_
            if many is not None:
                self.n_features_in_ = many
            return
        known = getattr(self, "n_features_in_", None)
        rows = isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point()
        if rows and many is not None and known is not None and many != known:
            raise InputError(
                f"X has {many} features, but {type(self).__name__} is expecting {known} features as input: as many as "
                "in fit."
            )

    def _gram(self, *sides: Samples | None) -> Gram:
        """The Gram of one side with itself, or of new samples with the training samples."""
        kernel = self.kernel_
        matrix: object = sides[0]  # "precomputed": it is the Gram
        if isinstance(kernel, Kernel):
            matrix = self._computed(kernel, *sides)
        elif callable(kernel):
            matrix = kernel(sides[0], sides[-1])
        if isinstance(matrix, Gram):
            gram = matrix
        else:
            array = np.asarray(_array(matrix))
            kind = array.dtype if array.dtype in (np.float32, np.float64) else np.float64
            # A tensor would write through to a mapped file that is open for reading only.
            gram = DenseGram(torch.from_numpy(np.require(array, kind, ["C", "W"])), symmetric=False)
        if len(gram.shape) == 4 and gram.shape[1] == gram.shape[3] == 1:  # the full kernel of a single output
            gram = DenseGram(gram.dense()[:, 0, :, 0], symmetric=gram._same_samples)
        return square(gram, "the Gram") if len(sides) == 1 else gram

    def _computed(self, kernel: Kernel, *sides: object) -> Gram:
        """By `compute`; where the network fails on the samples' type or shape, that is said."""
        try:
            return compute(kernel, *sides, memory=self.memory, progress=False)
        except RuntimeError as e:
            x = sides[0].take(slice(0, 1)) if isinstance(sides[0], Source) else cast(Inputs, sides[0])
            reason = misfit(e, x, "X", _kind(kernel))
            if reason is None:
                raise
            raise reason from e

    def _begin(self, X: object, n_targets: int, sample_weight: object) -> tuple[Samples, Tensor | None]:
        """Inputs and weights, checked before anything is computed."""
        x = self._inputs(X, fit=True)
        n = x.shape[0] if isinstance(x, np.ndarray | Gram) else len(source(x, "X"))
        if n != n_targets:
            raise InputError(f"X has {n} samples and y has {n_targets}; needed: one target for each sample.")
        if sample_weight is None:
            return x, None
        weights = np.array(_array(sample_weight), dtype=np.float64)
        if not weights.any():
            raise InputError("all sample weights are zero; needed: a positive one for at least one sample.")
        return x, checked_weights(weights, n, torch.empty(0, dtype=torch.float64))

    def _trained(self, x: Samples) -> Gram:
        """The Gram of the training samples, which are kept for predicting where they are needed."""
        self.kernel_ = self.kernel
        if isinstance(self.kernel, str):
            self.X_fit_ = self.fixed_ = None
            return self._gram(x)
        self.X_fit_ = _copied(x)
        K = self._gram(self.X_fit_)
        self.fixed_ = (*self._described(), K[:FEW].cpu())
        return K

    def _cross(self, X: object) -> Gram:
        """The Gram of new samples with the training samples."""
        check_is_fitted(self, "model_")
        x = self._inputs(X, fit=False)
        if self.fixed_ is None:
            return self._gram(x, self.X_fit_)
        spec, samples, first = self.fixed_
        now, same = self._described()
        unchanged(list(differences(spec, now)) + ["the training samples"] * (samples != same))
        limit = close(spec, first.dtype)
        kept = self.X_fit_
        if not self._goes_along(x, kept):
            few = self._few()
            unchanged(moved(few, first.narrow(first.dim() // 2, 0, len(few)), limit))
            return self._gram(x, self.X_fit_)
        i = int(first.abs().flatten(1).amax(1).argmax())  # the row that shows most
        # As the last row of the Gram of the new samples, it costs no pass of its own.
        new, trained = cast(Inputs, x), cast(Inputs, kept)
        sample = [v[i : i + 1] for _, v in tree.leaves(trained)]
        more = [torch.cat([v, w]) for (_, v), w in zip(tree.leaves(new), sample, strict=True)]
        matrix = self._gram(tree.rebuild(new, more), kept).dense()
        unchanged(moved(matrix[-1:].cpu(), first[i : i + 1], limit))
        return DenseGram(matrix[:-1], symmetric=False)

    def _goes_along(self, x: Samples, kept: Samples | None) -> bool:
        """Whether a training sample can be put behind these samples, so that no pass of its own is needed for it."""
        if not isinstance(self.kernel_, Kernel) or isinstance(x, Source) or isinstance(kept, Source):
            return False
        new = cast(Inputs, x)
        return tree.size(new) <= ALONG and tree.signature(new) == tree.signature(cast(Inputs, kept))

    def _described(self) -> tuple[Spec, str]:
        """What can be said of the kernel, its weights to the bit; and a hash of samples that are not held in memory."""
        spec = self.kernel_.spec() if isinstance(self.kernel_, Kernel) else {}
        return spec, self.X_fit_.digest() if isinstance(self.X_fit_, Source) else ""

    def _few(self) -> Tensor:
        """The Gram of the first training samples: it sees what no description holds, such as a hook or a global."""
        x = self.X_fit_
        few: Samples
        if isinstance(x, Source):
            few = x.take(slice(0, min(FEW, len(x))))
        else:
            few = x[:FEW] if isinstance(x, np.ndarray) else tree.take(cast(Inputs, x), slice(0, FEW))
        return self._gram(few).dense().cpu()

    def _reg(self) -> Reg:
        """`reg`, checked."""
        if not isinstance(self.reg, str):
            return checks.nonnegative(self.reg, "reg")
        if self.reg not in CHOICES_OF_REG:
            raise InputError(f"reg={self.reg!r}; needed: a number, at least 0, or 'loo' or 'gcv'.")
        return self.reg

    def _least_squares(self, K: Gram, y: Tensor, reg: Reg, weights: Tensor | None) -> KernelModel:
        """By ridge, or without reg by pseudo-inverse; `reg_` is what was used."""
        self.reg_ = _best(K, y, weights, self.regs, reg) if isinstance(reg, str) else reg
        if self.reg_ == 0:
            return ridgeless(K, y, sample_weights=weights)
        return ridge(K, y, reg=self.reg_, sample_weights=weights, solver=self.solver)


class KernelRegressor(RegressorMixin, _KernelEstimator):  # type: ignore[misc]
    """f = argmin Σ_i w_i (f(x_i) − y_i)² + reg·‖f‖²: kernel ridge regression, without intercept.

    `kernel`: a tangency kernel; a function k(X, Y); or "precomputed": X is then the Gram [n, n] in `fit` and [m, n] in
    `predict`, as an array or a `Gram` (which may lie on disk). y is [n] or [n, q], or [n, c] for a full kernel.
    `reg`: a number (0: the pseudo-inverse), or "loo" or "gcv": the one of `regs` of least predicted error, from one
    eigendecomposition; `reg_` says which. With weights, leaving out a sample leaves out its whole weight. `regs`:
    default λ̄·10⁻⁸, …, λ̄·10⁴ with λ̄ = tr K/n, less those within the rounding of K. `solver`: a way to solve for
    reg > 0 (`tg.linalg`). `memory`: as for `tg.compute`.

    With a tangency kernel X is a tensor or array of any number of dimensions, or a tuple or dict as the model takes it;
    real numbers are cast to the parameters' type, integers stay as they are. Predictions are NumPy in the Gram's type.
    The samples are copied (of a data set a hash is kept); a network that changed since `fit` is refused.

    >>> import tangency as tg
    >>> from sklearn.model_selection import cross_val_score
    >>> x = np.random.default_rng(0).normal(size=(60, 3))
    >>> kernel = tg.trace_ntk(tg.models.mlp([3, 64, 1]))
    >>> bool(cross_val_score(KernelRegressor(kernel, reg="loo"), x, x[:, 0], cv=3).min() > 0.9)
    True
    """

    def __init__(
        self,
        kernel: Choice = "precomputed",
        *,
        reg: Reg = 1.0,
        regs: Sequence[float] | None = None,
        solver: Solver | None = None,
        memory: Memory = None,
    ) -> None:
        self.kernel, self.reg, self.regs, self.solver, self.memory = kernel, reg, regs, solver, memory

    def __sklearn_tags__(self) -> "Tags":
        """As of all kernel estimators; y may have several columns."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: object, y: object, sample_weight: object = None) -> "KernelRegressor":
        """Fit to targets y [n] or [n, q]; `sample_weight`: how much each sample counts."""
        reg = self._reg()
        targets = check_array(_targets(y), dtype=np.float64, ensure_2d=False, input_name="y", estimator=self)
        x, weights = self._begin(X, len(targets), sample_weight)
        K = self._trained(x)
        self.model_ = self._least_squares(K, torch.tensor(targets, device=K.device), reg, weights)
        return self

    def predict(self, X: object) -> np.ndarray:
        """[m], or [m, q] as the targets were."""
        cross = self._cross(X)
        return _numpy(self.model_.predict(cross), cross)


class KernelClassifier(ClassifierMixin, _KernelEstimator):  # type: ignore[misc]
    """f = argmin Σ_i w_i loss(f(x_i), y_i) + (reg/2)·‖f‖²; the class of x is that of the largest f(x).

    `loss`: "logistic" (softmax for more than two classes), with an intercept per class unless bias=False; "square", of
    targets ±1 for two classes and one-hot for more, without intercept; "svm", scikit-learn's SVC with C = 1/reg, which
    has an intercept. `reg`, `regs`, `solver`: as in `KernelRegressor`, choices by "loo" or "gcv" and solvers for
    the square loss only; `kernel`, `memory` and X likewise. A full kernel [n, c, n, c] needs an output for each class.

    >>> import tangency as tg
    >>> x = np.random.default_rng(0).normal(size=(60, 3))
    >>> kernel = tg.trace_ntk(tg.models.mlp([3, 64, 2]))
    >>> fit = KernelClassifier(kernel, reg=0.1).fit(x, np.where(x[:, 0] > 0, "right", "left"))
    >>> fit.predict([[2.0, 0, 0], [-2.0, 0, 0]]).tolist(), fit.predict_proba(x).shape
    (['right', 'left'], (60, 2))
    """

    def __init__(
        self,
        kernel: Choice = "precomputed",
        *,
        loss: Literal["square", "logistic", "svm"] = "logistic",
        reg: Reg = 1.0,
        regs: Sequence[float] | None = None,
        bias: bool = True,
        solver: Solver | None = None,
        memory: Memory = None,
    ) -> None:
        self.kernel, self.loss, self.reg, self.regs, self.bias = kernel, loss, reg, regs, bias
        self.solver, self.memory = solver, memory

    def fit(self, X: object, y: object, sample_weight: object = None) -> "KernelClassifier":
        """Fit to labels y [n] of any kind; `sample_weight`: how much each sample counts."""
        reg = self._reg()
        targets = column_or_1d(_targets(y), warn=True)
        check_classification_targets(targets)
        self.classes_, index = np.unique(targets, return_inverse=True)
        x, weights = self._begin(X, len(targets), sample_weight)
        seen = self.classes_ if weights is None else np.unique(targets[weights.numpy() > 0])
        if len(seen) < 2:
            raise InputError(f"all samples (of positive weight) are of one class, {seen[0]}; needed: at least two.")
        K = self._trained(x)
        if len(K.shape) == 4 and (K.shape[1] != len(self.classes_) or self.loss == "svm"):
            raise InputError(
                f"the kernel is full over {K.shape[1]} outputs, y has {len(self.classes_)} classes and the loss is "
                f"{self.loss!r}; needed: as many outputs as classes, and loss 'square' or 'logistic'. Or trace over "
                "the outputs: tg.trace_ntk(model)."
            )
        labels = torch.from_numpy(index).to(K.device or "cpu")
        if self.loss == "square":
            self.model_ = self._least_squares(K, self._coded(labels, K), reg, weights)
            return self
        self.reg_ = float(reg)
        if self.loss == "logistic":
            self.model_ = logistic(K, labels, reg=self.reg_, sample_weights=weights, bias=self.bias)
        else:
            self.model_ = self._svm(K, labels, weights)
        return self

    def _coded(self, labels: Tensor, K: Gram) -> Tensor:
        """Targets for the square loss."""
        if len(self.classes_) == 2 and len(K.shape) == 2:
            return 2.0 * labels.double() - 1
        return torch.nn.functional.one_hot(labels).double()

    def _svm(self, K: Gram, labels: Tensor, weights: Tensor | None) -> SVC:
        """scikit-learn's, fitted to K [n, n] of the samples of positive weight."""
        # SVC takes wrong columns of a precomputed kernel where weights are zero (scikit-learn 1.9), so it gets none.
        self.kept_ = None if weights is None else np.flatnonzero(weights)
        kept = slice(None) if weights is None else self.kept_
        svc = SVC(kernel="precomputed", C=1 / self.reg_)
        matrix, index = K[kept, kept].cpu().numpy(), labels.cpu().numpy()[kept]
        return svc.fit(matrix, index, None if weights is None else weights.numpy()[kept])

    def decision_function(self, X: object) -> np.ndarray:
        """f(x): [m] for two classes (positive for the second), else [m, classes]."""
        cross = self._cross(X)
        if isinstance(self.model_, LogisticModel):
            f = self.model_.logits(cross)
        elif isinstance(self.model_, KernelModel):
            f = self.model_.predict(cross)
        else:
            f = torch.from_numpy(self.model_.decision_function(cross.select(None, self.kept_).dense().cpu().numpy()))
        two = f.dim() == 2 and f.shape[1] == 2  # of a full kernel
        return _numpy(f[:, 1] - f[:, 0] if two else f, cross)

    def predict(self, X: object) -> np.ndarray:
        """The likeliest of `classes_`."""
        f = self.decision_function(X)
        return self.classes_[f.argmax(1) if f.ndim == 2 else (f > 0).astype(int)]

    @available_if(lambda self: self.loss == "logistic")  # type: ignore[untyped-decorator]
    def predict_proba(self, X: object) -> np.ndarray:
        """[m, classes]; for the logistic loss only."""
        cross = self._cross(X)
        return _numpy(cast(LogisticModel, self.model_).probabilities(cross), cross)

    def audit(self, X: object, y: object, *, samples: int = 200, neighbours: int = 8, progress: bool = True) -> Audit:
        """Which of the labels y [n] are wrong, by leave-one-out with this kernel: `tg.audit` for arrays, without a fit.

        X as for `fit`; nothing of the estimator changes. The loss is the square one, reg the best by leave-one-out.
        """
        targets = column_or_1d(_targets(y), warn=True)
        check_classification_targets(targets)
        classes, index = np.unique(targets, return_inverse=True)
        work = clone(self)
        x, _ = work._begin(X, len(targets), None)
        K = work._trained(x)
        names = [str(c) for c in classes]
        return audit_gram(K, index, classes=names, samples=samples, neighbours=neighbours, progress=progress)

    def _reg(self) -> Reg:
        """`reg`, checked together with the loss."""
        reg = super()._reg()
        if self.loss not in CLASSIFIER_LOSSES:
            raise InputError(f"loss={self.loss!r}; needed: one of {', '.join(map(repr, CLASSIFIER_LOSSES))}.")
        if isinstance(reg, str) and self.loss != "square":
            raise InputError(
                f"reg={reg!r} with loss={self.loss!r}; what a fit predicts for a sample left out is known for "
                "loss='square' only. Give a number, found e.g. by sklearn.model_selection.GridSearchCV."
            )
        if reg == 0 and self.loss == "svm":
            raise InputError("reg=0 with loss='svm'; needed: a positive number (C = 1/reg).")
        return reg


def _best(K: Gram, y: Tensor, weights: Tensor | None, regs: Sequence[float] | None, by: Literal["loo", "gcv"]) -> float:
    """The reg of least predicted error."""
    problem = Problem.of(K, y, sample_weights=weights)
    whole = problem.spectrum()
    grid: Sequence[float] | Tensor
    if regs is not None:
        grid = regs
    else:
        grid = whole.values.mean() * torch.logspace(-8, 4, 13, dtype=whole.dtype, device=whole.device)
        # What rounding left below zero says how far K is known; K + reg stays positive definite above that.
        grid = grid[grid > -2 * whole.values[-1]]
        if not len(grid):
            raise NotPositiveDefinite(
                f"K has eigenvalues from {float(whole.values[-1]):.3g} to {float(whole.values[0]):.3g}: it is no Gram "
                "matrix of a kernel, or zero. Check the inputs, and which parameters count."
            )
    return cross_validate(whole, problem.target.reshape(whole.shape[0], -1), grid).best(by)


def _tensors(kernel: Kernel, X: object) -> Inputs | Source:
    """X as tensors of the parameters' type, checked; `compute` moves them to the kernel's device by blocks.

    Lists are arrays, as everywhere in scikit-learn; a tuple or dict holds several inputs. Data sets stay as they are.
    """
    if not isinstance(X, (Tensor, Mapping, tuple, Source, Dataset)):
        X = check_array(X, allow_nd=True, ensure_2d=False, ensure_all_finite=False, input_name="X")
    given = source(X, "X")
    if not isinstance(given, Arrays):
        return given
    x, kind, network = given.take(slice(0, len(given))), _kind(kernel), _network(kernel)
    if kind is not None and network is not None:
        x = network.narrowed(x, kind, "X")
    for name, v in tree.leaves(x):
        checks.finite(v, "X" + name[1:])
    return x


def _copied(x: Samples) -> Samples:
    """The samples as they are now; a source is asked for its hash instead."""
    if isinstance(x, Source):
        return x
    return x.copy() if isinstance(x, np.ndarray) else tree.transform(torch.clone, cast(Inputs, x))


def _kind(kernel: object) -> torch.dtype | None:
    """The type in which a kernel takes real inputs; None where it casts them itself, or does not say."""
    network = _network(kernel)
    if network is None or network.precision is not None:
        return None
    return next(p.dtype for p in network.model.parameters() if p.is_floating_point())


def _targets(y: object) -> object:
    """y as an array, or what scikit-learn makes one of; refused where it was left out."""
    if y is None:
        raise InputError("fit requires y to be passed, but the target y is None.")
    return _array(y)


def _array(v: object) -> object:
    """A tensor as an array; anything else as it is."""
    return v.detach().cpu().numpy() if isinstance(v, Tensor) else v


def _numpy(value: Tensor, cross: Gram) -> np.ndarray:
    """An array in the Gram's type, as scikit-learn's users expect of float32 data."""
    return value.to(cross.dtype).cpu().numpy()


def _network(kernel: object) -> Network | None:
    """The network that a kernel takes gradients of; of a combination, that of its first kernel."""
    if hasattr(kernel, "inner"):
        return _network(kernel.inner[0])
    return kernel.feature_map.network if isinstance(kernel, Empirical) else None
