"""Vargas, Tsou et al. 2023 (arXiv:2310.13836), Fig. 12 to 15: a network's embeddings tell data sets apart.

The paper looks at densities of the first two components; here each comparison is a test with a p-value, and two halves
of one set are compared 500 times: how often is a shift seen that is none?
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._base.progress import Tick, bar
from ..datasets import Labelled, cifar10, digits
from ..distributions import classifier_test_features, mmd
from ..errors import InputError
from ..kernels.gaussian import gaussian
from ..models import fit, initialized, small_cnn
from ..representations import Shift, layer_outputs, shift
from ..representations.carriers import bent, compare_components
from ..representations.layers import matching
from .corruptions import CORRUPTIONS
from .shift_texts import encoder, reviews, sentences, tokenized
from .table import Kept, Options, Row, Table

SAMPLES, TRAINED, EPOCHS = 1500, 10_000, 6
# Of one set, so many samples are halved, so many times.
HALVED, HALVINGS, QUICK_HALVINGS = 600, 500, 10
CASES = ("cifar10", "reviews", "tweets", "level")
# The part of the source that is kept by the filter, fixed before anything was measured.
KEEP = 0.3
COLUMNS = (
    "source", "target", "layer", "n", "m", "AUROC", "p MMD", "p classifier", "p", "differ", "rejected %", "all %",
    "filtered %", "random %",
)  # fmt: skip
NOTES = (
    "p: twice the smaller of the p-values of MMD and of the classifier (999 permutations: 0.002 is the least there is)",
    "differ: components of which a Kolmogorov-Smirnov test, corrected by Holm, rejects at 5 %.",
    "CIFAR-10: test images against other test images, corrupted; a small CNN trained on 10,000 training images, by its",
    "  first layer after a ReLU (channels, averaged over positions) and its last hidden layer.",
    "Corruptions at severity 1 of Hendrycks & Dietterich 2019: noise 0.04, blur 0.4 pixels, contrast 0.75, JPEG 80.",
    "Reviews, tweets: MiniLM, mean over at most 64 tokens. IMDb without HTML, each review cut to as many words as a",
    "  sentence of Rotten Tomatoes has, so that lengths are alike; that a review ends amid a sentence can still tell.",
    "all, filtered, random %: accuracy on the target of a probe trained on all source samples, on the 30 % most like",
    "  the target, and on as many random ones.",
    "halves: 600 samples divided at random 500 times: how often p, p MMD, p classifier are at most .05 (rejected %).",
)


class Compared(NamedTuple):
    """A comparison that was made."""

    key: str
    model: nn.Module
    source: Labelled
    target: Labelled
    names: tuple[str, str]
    layer: str


def comparisons(case: str, options: Options, kept: Kept, n: int) -> Iterator[Compared]:
    """Every comparison of a case."""
    if case == "cifar10":
        model, source, other = pictures(options, kept, n)
        assert isinstance(other.x, Tensor)
        clean = "digits" if options.quick else "CIFAR-10"
        for name, corrupt in CORRUPTIONS.items():
            target = other.with_x(corrupt(other.x, 0))
            for layer in layers_of(model):
                yield Compared(f"{name}, layer {layer}", model, source, target, (clean, f"{clean}, {name}"), layer)
        return
    model, tokenizer = encoder(options)
    known, asked = (tokenized(v, tokenizer) for v in (reviews if case == "reviews" else sentences)(options, n))
    yield Compared(case, model, known, asked, (known.name, asked.name), layers_of(model)[-1])


def pictures(options: Options, kept: Kept, n: int) -> tuple[nn.Module, Labelled, Labelled]:
    """A trained CNN, and two sets of n images that it has not seen."""
    epochs = options.learned.epochs or EPOCHS
    if options.quick:
        train, test = digits()
        model = kept.network(
            initialized(lambda: small_cnn(10, 1, 8, hidden=(64,), parametrization="standard"), seed=0),
            lambda m: fit(m, train.x, train.y, epochs=3, lr=3e-3, batch=50, optimizer="adam", progress=False),
        )
        source, other = test.split(0.5)
        return model.eval(), source, other
    train, test = cifar10(options.folder("CIFAR-10 in its binary version (cifar-10-batches-bin)"))
    if 2 * n > len(test):
        raise InputError(f"--samples {n}; needed: at most {len(test) // 2}, half of the test images.")
    known = train.take(TRAINED, seed=0)
    model = initialized(lambda: cifar_network(), seed=0)
    model = kept.network(
        model, lambda m: fit(m, known.x, known.y, epochs=epochs, lr=2e-3, batch=100, optimizer="adam",
                             progress=options.progress),
    )  # fmt: skip
    source, other = test.take(2 * n, seed=0).split(0.5)
    return model.eval(), source, other


def cifar_network() -> nn.Sequential:
    """Three convolutions and two linear layers."""
    return small_cnn(10, 3, 32, hidden=(64,), parametrization="standard")


def shift_row(names: tuple[str, str], found: Shift, probed: bool) -> Row:
    """One line of the table; `probed`: with what the filter does to a probe."""
    c = found.classifier
    effect = found.downstream(keep=KEEP) if probed else None
    accuracies = {} if effect is None else effect.accuracy
    return {
        "source": names[0], "target": names[1], "layer": found.layer, "n": len(found.z_source),
        "m": len(found.z_target), "AUROC": f"{c.auc.value:.3f}", "p MMD": f"{found.mmd.p:.3f}",
        "p classifier": f"{c.p:.3f}", "p": f"{found.p:.3f}",
        "differ": int((found.components.p <= 0.05).sum()), "rejected %": "",
        **{f"{how} %": f"{100 * value:.1f}" for how, value in accuracies.items() if how != "weighted"},
        "figures": found.summary(), "probe": None if effect is None else effect.to_dict(),
        "filter": found.filter(KEEP).sentence(),
    }  # fmt: skip


def level_row(name: str, layer: str, z: Tensor, draws: int, options: Options) -> Row:
    """How often two halves of one set are found to differ."""
    with bar(draws, f"halves of {name}", "draw", show=options.progress) as tick:
        p = halvings(z, draws, tick)
    rate = (100 * (p <= 0.05).double().mean(0)).tolist()
    return {
        "source": f"halves of {name}", "target": f"{draws} times", "layer": layer, "n": len(z) // 2,
        "m": len(z) - len(z) // 2, "AUROC": "", "p MMD": f"{rate[1]:.1f} %", "p classifier": f"{rate[2]:.1f} %",
        "p": "", "differ": f"{rate[3]:.1f} %", "rejected %": f"{rate[0]:.1f}", "p values": p.tolist(),
    }  # fmt: skip


def halvings(z: Tensor, draws: int, tick: Tick) -> Tensor:
    """What `shift` says of many halves: p, that of MMD, of the classifier, and the least of any component, [draws, 4].

    All of it is the same for every halving, but for which sample is in which half: components, bandwidth, scales.
    """
    half = len(z) // 2
    whole = shift(None, z[:half], z[half:], draws=39, progress=False)
    x = torch.cat([whole.z_source, whole.z_target])
    gram, features = gaussian(x)(x), bent(x, x.std(0, correction=0))
    found = []
    for seed in range(draws):
        order = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))
        a, b = order[:half], order[half:]
        by_mmd = mmd(gram, a, b, draws=199, seed=seed, progress=False).p
        by_classifier = classifier_test_features(features[a], features[b], draws=199, seed=seed, progress=False).p
        least = float(compare_components(x[a], x[b], whole.components.explained).p.min())
        found.append([min(1.0, 2 * min(by_mmd, by_classifier)), by_mmd, by_classifier, least])
        tick()
    return torch.tensor(found, dtype=torch.float64)


def reproduce_shift(options: Options) -> Table:
    """Every case, and halves of one set of each kind."""
    n = options.learned.samples or SAMPLES
    cases = options.cases or (("cifar10", "level") if options.quick else CASES)
    for case in cases:
        if case not in CASES:
            raise InputError(f"--cases {case}; needed: some of {', '.join(CASES)}.")
    # Rows that need no network of ours are kept by themselves: they stay where it is trained anew.
    trained = Kept(options, "shift-images", {"samples": n, "epochs": options.learned.epochs or EPOCHS})
    encoded = Kept(options, "shift-texts", {"samples": n})
    rows: list[Row] = []
    for case in cases:
        of = (
            ("cifar10",)
            if case == "level" and options.quick
            else ("cifar10", "reviews")
            if case == "level"
            else (case,)
        )
        for part in of:
            rows += measured(case, part, options, trained if part == "cifar10" else encoded, n)
    facts = {"samples": n, "runs": {**trained.rows, **encoded.rows}}
    return Table("Shifts seen by networks' embeddings", COLUMNS, tuple(rows), NOTES, facts)


def measured(case: str, part: str, options: Options, kept: Kept, n: int) -> list[Row]:
    """Rows of one case that were not measured before; of "level" the halves of the sources of `part`."""
    rows = []
    for one in comparisons(part, options, kept, n):
        key = f"{case}, {part}" if case == "level" else f"{case}, {one.key}"
        if key not in kept:
            if case == "level":
                layer = layers_of(one.model)[-1]
                outputs = layer_outputs(one.model, one.source, layer, pool="mean", progress=False)
                z = outputs[layer].flatten(1).cpu()[:HALVED]
                kept[key] = level_row(one.names[0], layer, z, QUICK_HALVINGS if options.quick else HALVINGS, options)
            else:
                found = shift(
                    one.model, one.source, one.target, layers=one.layer, names=one.names, progress=options.progress
                )
                kept[key] = shift_row(one.names, found, case != "cifar10")
        rows.append(kept[key])
        if case == "level":
            break
    return rows


def layers_of(model: nn.Module) -> tuple[str, str]:
    """The first layer after a nonlinearity, if there is one, and the last, which `shift` looks at by default."""
    blocks = matching(model, None)
    first = [name for name in blocks if isinstance(model.get_submodule(name), nn.ReLU)]
    return (first or blocks)[0], blocks[-1]
