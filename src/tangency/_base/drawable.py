"""What pictures take, those of `tangency.plots` and of rooms: results are described here by what is drawn of them.

So `plots` imports no room, and the `plot()` of any result may import the file that draws it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from torch import Tensor


class DrawnRisk(Protocol):
    """Errors of ridge regression, [sizes, repeats, regs] each, as `tg.regress.risk_study` returns them."""

    @property
    def sizes(self) -> Sequence[int]:
        """How many training samples."""

    @property
    def regs(self) -> Tensor:
        """The regularisations, [regs]."""

    @property
    def train(self) -> Tensor:
        """Errors on the training samples."""

    @property
    def gcv(self) -> Tensor:
        """Test errors predicted by generalised cross-validation."""

    @property
    def loo(self) -> Tensor:
        """Test errors predicted by leaving one sample out."""

    @property
    def measured(self) -> Tensor:
        """Errors on the test samples."""


class DrawnRegime(Protocol):
    """How a kernel moved during training, [steps] each, as `tg.dynamics.Monitor` saw it."""

    @property
    def steps(self) -> Tensor:
        """When it was looked at."""

    @property
    def change(self) -> Tensor:
        """‖Θ_t − Θ_0‖ / ‖Θ_0‖."""

    @property
    def cosine(self) -> Tensor:
        """Of Θ_t and Θ_0."""

    @property
    def velocity(self) -> Tensor:
        """How fast it turned, per step."""


class DrawnEvolution(Protocol):
    """What was recorded of a training, as `tg.dynamics.Monitor` has it."""

    @property
    def steps(self) -> Tensor:
        """When it was looked at, [t]."""

    @property
    def values(self) -> Mapping[str, Tensor]:
        """Each quantity, [t] or [t, k]."""

    def titles(self) -> Mapping[str, str]:
        """What each quantity is, in words."""


class DrawnFlow(Protocol):
    """Gradient flow along the eigenvectors of a kernel, as `tg.dynamics.flow` returns it."""

    @property
    def values(self) -> Tensor:
        """Eigenvalues, largest first, [r]."""

    @property
    def energy(self) -> Tensor:
        """What there is to learn along each eigenvector at the start, [r]."""

    def loss_by_mode(self, times: Sequence[float]) -> Tensor:
        """What is left of `energy` at each time, [t, r]."""

    def time_to_fit(self) -> Tensor:
        """When 1 % of the error along each eigenvector is left, [r]."""


class DrawnConvergence(Protocol):
    """Distances to the infinite-width limit, as `tg.studies.convergence` returns them."""

    MEANING: ClassVar[Mapping[str, str]]

    @property
    def widths(self) -> Sequence[int]:
        """Widths of the networks."""

    @property
    def seeds(self) -> Sequence[int]:
        """Draws of the weights at each width."""

    @property
    def slopes(self) -> Mapping[str, object]:
        """The fitted exponent of the width for each quantity; prints as number ± error."""

    def measured(self) -> Mapping[str, Tensor]:
        """Each quantity by width and seed, [w, s]."""


class DrawnPhase(Protocol):
    """One point of the phase diagram."""

    @property
    def depth(self) -> float:
        """The correlation depth ξ, in layers."""


class DrawnPhases(Protocol):
    """Condition numbers over depth and variance, as `tg.studies.trainability` returns them."""

    @property
    def activation(self) -> str:
        """Its name."""

    @property
    def b_var(self) -> float:
        """σ_b² of all networks."""

    @property
    def w_vars(self) -> Sequence[float]:
        """σ_w² of the columns."""

    @property
    def depths(self) -> Sequence[int]:
        """Depths of the rows."""

    @property
    def kappa(self) -> Tensor:
        """κ(Θ), [depths, w_vars]."""

    @property
    def predictor(self) -> Tensor:
        """The size of the mean predictor, [depths, w_vars]."""

    @property
    def phases(self) -> Sequence[DrawnPhase]:
        """Of each column."""

    @property
    def critical(self) -> float:
        """σ_w² of the boundary at `b_var`."""

    @property
    def edge(self) -> tuple[Tensor, Tensor]:
        """(σ_b², σ_w²) along the boundary."""


class DrawnProjection(Protocol):
    """Errors of one projected kernel, as `tg.projection_error` returns them."""

    @property
    def kind(self) -> str:
        """Of the random matrix."""

    @property
    def dim(self) -> int:
        """Dimensions that it projects to."""

    @property
    def residuals(self) -> Tensor:
        """Relative errors of all pairs of samples."""

    @property
    def expected_rms(self) -> float | None:
        """The root mean square that theory predicts, where it does."""


class DrawnInterval(Protocol):
    """An interval."""

    @property
    def low(self) -> float:
        """Its lower end."""

    @property
    def high(self) -> float:
        """Its upper end."""


class DrawnFaithfulness(Protocol):
    """How a surrogate follows its network, as `tg.surrogate.faithfulness` returns it."""

    @property
    def tau(self) -> float:
        """Kendall's τ of their log-odds."""

    @property
    def tad(self) -> float:
        """The surrogate's accuracy less the network's."""

    @property
    def pearson(self) -> float:
        """The correlation of their probabilities."""

    @property
    def r2(self) -> float:
        """The part of the variance that the map explains."""

    @property
    def level(self) -> float:
        """Of the intervals."""

    @property
    def intervals(self) -> Mapping[str, DrawnInterval]:
        """Of tau, tad and pearson."""

    @property
    def map(self) -> Callable[[Tensor], Tensor]:
        """From the surrogate's log-odds to the network's."""


class DrawnExplanation(Protocol):
    """What one kernel says, as `tg.explain` returns it."""

    @property
    def name(self) -> str:
        """The kernel's."""

    @property
    def faithfulness(self) -> DrawnFaithfulness:
        """Of its surrogate."""

    @property
    def values(self) -> Tensor:
        """Eigenvalues of its Gram, largest first."""


class DrawnAttribution(Protocol):
    """Attributions of m decisions to q logits each, by t classes, as `tg.decisions.summarize` returns them."""

    @property
    def outputs(self) -> Tensor:
        """Which logits, [m, q]."""

    @property
    def totals(self) -> Tensor:
        """The model's logits, [m, q]."""

    @property
    def boxes(self) -> Tensor:
        """Lower whisker, quartiles, upper whisker, mean, [m, q, t, 6]."""

    @property
    def fliers(self) -> Tensor:
        """The farthest outliers, padded with NaN, [m, q, t, f]."""


class DrawnTraining(Protocol):
    """What `draw_training` reads: of `models.Training`."""

    @property
    def loss(self) -> Tensor:
        """The mean loss of each epoch."""
        ...

    @property
    def accuracy(self) -> Tensor | None:
        """The training accuracy of each epoch, if there are classes."""
        ...

    @property
    def test_accuracy(self) -> Tensor | None:
        """The test accuracy after each epoch, if there is a test set."""
        ...


class DrawnClasses(Protocol):
    """Samples with classes."""

    @property
    def classes(self) -> Sequence[str]:
        """Their names."""


class DrawnSuspects(Protocol):
    """What is said of each training sample's label."""

    @property
    def given(self) -> Tensor:
        """Labels or targets."""

    @property
    def suggested(self) -> Tensor:
        """What they should be."""

    @property
    def wrong(self) -> Tensor:
        """Probabilities, [n]."""

    @property
    def margin(self) -> Tensor:
        """How far the others agree, [n]."""


class DrawnNoise(Protocol):
    """How many labels are wrong."""

    @property
    def counts(self) -> Tensor:
        """Samples by the class given and the class that is expected, [c, c]."""

    def pairs(self, most: int = 10) -> list[tuple[int, int, float, float]]:
        """Given class, suggested class and the interval of their number, the most frequent first."""


class DrawnCleaning(Protocol):
    """Test scores without the most suspicious samples."""

    @property
    def removed(self) -> Tensor:
        """How many, [r]."""

    @property
    def dropped(self) -> Tensor:
        """Scores without them."""

    @property
    def mended(self) -> Tensor:
        """Scores with the suggested labels."""

    @property
    def suspects(self) -> int:
        """How many are more likely wrong than right."""

    @property
    def score(self) -> str:
        """What the scores are."""


class DrawnAudit(Protocol):
    """What `tg.audit` found."""

    @property
    def train(self) -> DrawnClasses:
        """The samples."""

    @property
    def suspects(self) -> DrawnSuspects:
        """Of each sample."""

    @property
    def noise(self) -> DrawnNoise:
        """Of all."""

    @property
    def cleaning(self) -> DrawnCleaning | None:
        """Where there is a test set."""

    @property
    def real(self) -> bool:
        """Whether targets are real numbers."""


class DrawnStart(Protocol):
    """The network before training, as `tg.studies.alignments` returns it."""

    @property
    def largest(self) -> Mapping[str, float]:
        """λ₁ of the weights and of both kernels."""


class DrawnTransition(Protocol):
    """What SGD leaves at each learning rate, as `tg.studies.transition` returns it."""

    @property
    def lrs(self) -> Sequence[float]:
        """The learning rates, rising."""

    @property
    def weights(self) -> Tensor:
        """λ₁ of W Wᵀ/d."""

    @property
    def ck(self) -> Tensor:
        """λ₁ of the CK."""

    @property
    def feature(self) -> Tensor:
        """|βᵀu₁|."""

    @property
    def labels_ck(self) -> Tensor:
        """|yᵀv₁|/‖y‖ of the CK."""

    @property
    def labels_ntk(self) -> Tensor:
        """|yᵀv₁|/‖y‖ of the NTK."""

    @property
    def error(self) -> Tensor:
        """Mean squares on the test samples."""

    @property
    def edge(self) -> float:
        """Above it, λ₁ of W Wᵀ/d is an outlier."""

    @property
    def initial(self) -> DrawnStart:
        """Before training."""

    @property
    def threshold(self) -> float:
        """The learning rate from which on there are outliers."""


class DrawnRun(Protocol):
    """A training that was followed, as `tg.studies.learn` returns it."""

    @property
    def seen(self) -> Sequence[Mapping[str, float]]:
        """What was looked at, with the epoch."""


class DrawnGrids(Protocol):
    """κ and the mean predictor over depth and variance, as `tg.studies.trainability` returns them."""

    @property
    def w_vars(self) -> Sequence[float]:
        """σ_w² of the columns."""

    @property
    def depths(self) -> Sequence[int]:
        """Depths of the rows."""

    @property
    def kappa(self) -> Tensor:
        """κ(Θ), [depths, w_vars]."""

    @property
    def predictor(self) -> Tensor:
        """The mean predictor's size, [depths, w_vars]."""
