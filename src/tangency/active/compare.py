"""Strategies beside each other: labels bought round by round, the learner fitted again, its accuracy on a test set."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._base import checks
from .._base.progress import bar
from .._base.results import Result, text_table
from .._base.types import Float, Int
from ..datasets import Labelled, labelled
from ..datasets.labelled import Samples
from ..errors import InputError
from ..gram.compute import compute
from ..gram.gram import Gram
from ..kernels.kernel import Kernel
from ..models import accuracy
from ..regress import ridge
from .campaign import MOST, Campaign
from .lookahead import default_reg
from .round import OutputsAre
from .strategies import Strategy, named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# From the samples with labels, and a seed, to a trained network.
Train = Callable[[Labelled, int], nn.Module]
Strategies = Sequence[str] | Mapping[str, str | Strategy]


class Gain(NamedTuple):
    """The mean over the seeds of a difference, and an interval for it."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """Test accuracies [strategies, seeds, rounds + 1] after so many `labels` [rounds + 1], the start first.

    `seconds`: what asking took, the mean over all rounds, kernels and outputs included. Intervals, with confidence
    `level`, are Student's over the seeds; all strategies of a seed begin with the same labels.
    """

    names: tuple[str, ...]
    labels: Int[Tensor, " r"]
    accuracy: Float[Tensor, "s k r"]
    seconds: Float[Tensor, " s"]
    level: float

    UNITS: ClassVar[Mapping[str, str]] = {"seconds": "s"}

    def area(self) -> Float[Tensor, "s k"]:
        """The mean accuracy over the labels bought, the area under the curve divided by its width, of each seed."""
        widths = self.labels.diff().to(self.accuracy)
        middles = (self.accuracy[:, :, 1:] + self.accuracy[:, :, :-1]) / 2
        return (middles * widths).sum(2) / widths.sum()

    def gain(self, name: str, over: str = "random", *, final: bool = False) -> Gain:
        """By how much the area (the last accuracy, if `final`) is above that of another strategy, seed by seed."""
        for given in (name, over):
            checks.choice(given, "strategy", self.names)
        value = self.accuracy[:, :, -1] if final else self.area()
        return interval(value[self.names.index(name)] - value[self.names.index(over)], self.level)

    def table(self) -> str:
        """A line for each strategy: the area, the last accuracy, and what is gained over the one named "random"."""
        base = "random" if "random" in self.names else self.names[-1]
        head = ["strategy", "area %", f"after {int(self.labels[-1])} %", f"area − {base}", f"{self.level:.0%} interval"]
        rows: list[list[object]] = []
        for k, name in enumerate(self.names):
            gain = self.gain(name, base)
            there = [f"{100 * float(v):.1f}" for v in (self.area()[k].mean(), self.accuracy[k, :, -1].mean())]
            shown = ["", ""] if name == base else [f"{100 * gain.mean:+.1f}", f"{_percent(gain)}"]
            rows.append([name, *there, *shown, f"{float(self.seconds[k]):.2g}"])
        return text_table([*head, "s to ask"], rows)

    def plot(self) -> "Figure":
        """Accuracy by labels for each strategy, and beside it what is gained over "random", with intervals."""
        from .pictures import draw_comparison

        base = "random" if "random" in self.names else self.names[-1]
        start = self.accuracy[self.names.index(base)]
        gains = [[interval(v, self.level) for v in (a - start).T] for a in self.accuracy]
        return draw_comparison(self.names, self.labels, self.accuracy.mean(1), gains, base)


def compare(
    strategies: Strategies,
    pool: Samples,
    test: Samples,
    learner: Kernel | Train,
    *,
    start: int = 20,
    batch: int = 20,
    rounds: int = 10,
    seeds: int | Sequence[int] = 5,
    reg: float | None = None,
    most: int = MOST,
    outputs_are: OutputsAre = "logits",
    level: float = 0.95,
    progress: bool = True,
) -> Comparison:
    """Accuracy on `test` after each of `rounds` batches of labels from `pool`, by strategy and seed.

    `learner`: a kernel, whose ridge fit to the labels so far then is the learner; or a function (samples, seed) ->
    trained network, called anew after every round. `strategies`: names of `tg.active.STRATEGIES`, or a dict of names
    and functions (round, count) -> candidates. `seeds`: how many, or which; each begins with `start` labels at random,
    the same for all strategies. `reg`, `most` and `outputs_are`: as for `Campaign.ask`. Cost: strategies · seeds ·
    rounds trainings and Grams; with a kernel, one Gram of the pool and of the test samples with it.

    >>> import tangency as tg
    >>> pool, test = (part.with_x(part.x.flatten(1)) for part in tg.datasets.digits())
    >>> kernel = tg.infinite_ntk(tg.models.mlp([64, 16, 10]))
    >>> found = tg.active.compare(["lookahead", "random"], pool.take(200), test.take(200), kernel, rounds=2, seeds=2)
    >>> found.accuracy.shape, found.gain("lookahead").low < 1
    (torch.Size([2, 2, 3]), True)
    """
    pool, test = labelled(pool, name="pool"), labelled(test, name="test")
    chosen = _named(strategies)
    _check(len(chosen), len(pool), start, batch, rounds, level)
    runs = _seeds(seeds)
    if pool.classes != test.classes:
        raise InputError(f"pool has the classes {pool.classes} and test {test.classes}; needed: the same, in order.")
    fit = _ridge(learner, pool, test, reg, progress) if isinstance(learner, Kernel) else _training(learner, pool, test)
    found = torch.empty(len(chosen), len(runs), rounds + 1, dtype=torch.float64)
    seconds = torch.zeros(len(chosen), dtype=torch.float64)
    ask = _Ask(start, batch, rounds, most, reg, outputs_are)
    with bar(len(chosen) * len(runs), "comparing", "campaign", show=progress) as tick:
        for k, (name, strategy) in enumerate(chosen.items()):
            for run, seed in enumerate(runs):
                curve, took = _follow(Campaign(pool.x, pool.classes, strategy=strategy, seed=seed), pool.y, fit, ask)
                found[k, run] = torch.tensor(curve, dtype=torch.float64)
                seconds[k] += took / (len(runs) * rounds)
                tick(note=f"{name}: {curve[-1]:.1%}")
    return Comparison(tuple(chosen), start + batch * torch.arange(rounds + 1), found, seconds, level)


class _Ask(NamedTuple):
    """How much is asked for, and how."""

    start: int
    batch: int
    rounds: int
    most: int
    reg: float | None
    outputs_are: OutputsAre


def _follow(campaign: Campaign, y: Tensor, fit: "_Fit", ask: _Ask) -> tuple[list[float], float]:
    """The accuracies of one campaign, the start first, and the seconds that asking took in all."""
    index = campaign.ask(ask.start, strategy="random", most=campaign.size)
    curve, seconds = list[float](), 0.0
    for number in range(ask.rounds + 1):
        campaign.tell(index, y[index.to(y.device)].cpu())
        now = fit(campaign.labelled, campaign.seed)
        curve.append(now.accuracy)
        if number < ask.rounds:
            before = perf_counter()
            index = campaign.ask(
                ask.batch,
                now.model,
                kernel=now.gram,
                outputs_are=ask.outputs_are,
                most=ask.most,
                reg=ask.reg,
                progress=False,
            )
            seconds += perf_counter() - before
    return curve, seconds


class _Fitted(NamedTuple):
    """A learner after a round: its test accuracy, and what says what to ask for next."""

    accuracy: float
    model: nn.Module | None
    gram: Gram | None


_Fit = Callable[[Tensor, int], _Fitted]  # from the samples with labels, and a seed


def _training(train: Train, pool: Labelled, test: Labelled) -> _Fit:
    """The user's own training."""
    if not callable(train) or isinstance(train, nn.Module):
        raise InputError(
            f"learner is a {type(train).__name__}; needed: a kernel, or a function (samples, seed) -> network."
        )

    def fit(index: Tensor, seed: int) -> _Fitted:
        model = train(pool.select(index), seed)
        if not isinstance(model, nn.Module):
            raise InputError(f"learner returned a {type(model).__name__}; needed: the trained torch.nn.Module.")
        return _Fitted(accuracy(model, test), model, None)

    return fit


def _ridge(kernel: Kernel, pool: Labelled, test: Labelled, reg: float | None, progress: bool) -> _Fit:
    """Ridge regression to the classes, from Grams that are computed once."""
    gram = compute(kernel, pool.x, progress=progress)
    cross = compute(kernel, test.x, pool.x, progress=progress)
    reg = default_reg(gram) if reg is None else reg
    onehot, y = F.one_hot(pool.y, len(pool.classes)).double().cpu(), test.y

    def fit(index: Tensor, seed: int) -> _Fitted:
        targets = onehot[index].to(gram.device or "cpu")
        found = ridge(gram.select(index, index), targets, reg=reg).predict(cross.select(None, index)).argmax(1)
        return _Fitted(float((found == y.to(found.device)).double().mean()), None, gram)

    return fit


def interval(values: Tensor, level: float) -> Gain:
    """The mean and Student's interval for it, from independent draws; without one where there is a single draw.

    >>> gain = interval(torch.tensor([1.0, 2.0, 3.0]), 0.95)
    >>> round(gain.low, 3), round(gain.high, 3)
    (-0.484, 4.484)
    """
    v, n = values.double(), len(values)
    mean = float(v.mean())
    if n < 2:
        return Gain(mean, -math.inf, math.inf)
    reach = student(level, n - 1) * float(v.std()) / math.sqrt(n)
    return Gain(mean, mean - reach, mean + reach)


def student(level: float, degrees: int) -> float:
    """t with P(|T| < t) = level for Student's T: with T = √ν tan θ, θ has the density cos^{ν−1} θ on (−π/2, π/2).

    >>> round(student(0.95, 4), 3)
    2.776
    """
    theta = torch.linspace(0, math.pi / 2, 200_001, dtype=torch.float64)
    density = theta.cos().clamp_min(0) ** (degrees - 1)
    inside = torch.cumulative_trapezoid(density, theta)
    at = int((inside < level * inside[-1]).sum())
    return math.sqrt(degrees) * math.tan(float(theta[at + 1]))


def _named(strategies: Strategies) -> dict[str, str | Strategy]:
    """By their names; functions have those of the dict that they come in."""
    if isinstance(strategies, str):
        raise InputError(f"strategies={strategies!r}; needed: a list of names, [{strategies!r}, 'random'].")
    known = strategies if isinstance(strategies, Mapping) else {name: name for name in strategies}
    for name, strategy in known.items():
        if not isinstance(name, str):
            raise InputError(f"strategies holds {name!r}; needed: names, or a dict of names and functions.")
        named(strategy)
    return dict(known)


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    """So many from 0 on, or those that were given."""
    if not isinstance(seeds, Sequence) or isinstance(seeds, str):
        checks.positive(seeds, "seeds", "how many, or a list of them")
        return list(range(seeds))
    if not len(seeds) or len(set(seeds)) < len(seeds):
        raise InputError(f"seeds={list(seeds)}; needed: at least one, each once, or how many.")
    return list(seeds)


def _check(strategies: int, pool: int, start: int, batch: int, rounds: int, level: float) -> None:
    if not strategies:
        raise InputError("strategies is empty; needed: some of tg.active.STRATEGIES by name, or a dict of functions.")
    for name, value in {"start": start, "batch": batch, "rounds": rounds}.items():
        checks.positive(value, name, "a whole number")
    if start + batch * rounds > pool:
        raise InputError(
            f"start={start} and rounds={rounds} of batch={batch} take {start + batch * rounds} samples, and the pool "
            f"has {pool}. Take fewer, or a larger pool."
        )
    if not 0 < checks.nonnegative(level, "level") < 1:
        raise InputError(f"level={level}; needed: a confidence between 0 and 1.")


def _percent(gain: Gain) -> str:
    return f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f}"
