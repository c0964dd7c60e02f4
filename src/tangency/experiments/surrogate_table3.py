"""Engel et al. 2024, Table 3: a CNN with a back door on CIFAR-10; which kernel finds the poisoned test images?

A tenth of the training images get a yellow square and the label of one class. A test image is flagged if at least 3 of
its 5 most similar training images are poisoned. The square's size and place and the target are not stated in the paper.
"""

import torch
from torch import Tensor

from ..datasets import Labelled, cifar10
from ..decisions import Grams, kernels
from ..decisions.forensics import YELLOW, Patch, detect, poison
from ..gram.gram import Gram
from ..models import Recipe, accuracy, forensics_cnn, initialized, outputs
from ..models import fit as train
from ..surrogate import default_reg, faithfulness, fit
from .bundled import images
from .table import Kept, Options, Row, Table

TABLE3_PUBLISHED = {
    "trNTK": ("99.99", "99.98", "0.585", "+0.10", "0.441", "-1.08"),
    "trNTK⁰": ("99.99", "99.99", "0.518", "+0.12", "0.543", "+0.44"),
    "Em": ("99.71", "100.00", "0.430", "-2.73", "0.261", "-13.98"),
    "CK": ("1.65", "50.61", "0.552", "-3.50", "0.454", "-81.25"),
    "proj-trNTK": ("99.99", "99.97", "0.565", "+0.09", "0.418", "+1.3"),
    "proj-pNTK": ("99.99", "100.00", "0.554", "+0.07", "0.665", "-1.3"),
}
TARGET, RATE, ALPHA = 2, 0.1, 1e-2
TABLE3_NOTES = (
    "Precision and recall of flagging by 3 of the 5 most similar training images, over clean and poisoned test images.",
    "poisoned τ_K and TAD: on test images that all have the square, the target counting as the correct class.",
    "Surrogates: α = 1e-2 with classes weighted alike, as in the authors' scripts; here the optimum.",
)


def images_and_patch(options: Options) -> tuple[Labelled, Labelled, Patch]:
    """(train, test, the square that is painted on the poisoned images)."""
    if options.quick:
        return *images(4), Patch(6, YELLOW)
    known, asked = cifar10(options.folder("CIFAR-10 in its binary version (cifar-10-batches-bin)"))
    return known, asked, Patch(4, YELLOW, margin=1)


def cnn_recipe(options: Options) -> Recipe:
    """How the CNN is trained: 30 epochs, or 20 small ones for --quick."""
    made = Recipe(epochs=30, lr=1e-2, schedule="cosine", channels_last=options.device == "cuda")
    return made.but(epochs=20, batch=16, lr=5e-2) if options.quick else made


def reproduce_table3(options: Options) -> Table:
    """A poisoned CNN, and for every kernel what it flags and how faithful its surrogate is."""
    how = cnn_recipe(options)
    known, asked, patch = images_and_patch(options)
    spec = {"recipe": how, "patch": patch, "target": TARGET, "rate": RATE, "alpha": ALPHA}
    kept = Kept(options, "surrogate-table3", spec)
    assert isinstance(known.x, Tensor)
    assert isinstance(asked.x, Tensor)
    planted = poison(known.x, known.y, patch=patch, target=TARGET, rate=RATE)
    fresh = initialized(lambda: forensics_cnn(len(known.classes), width=8 if options.quick else 32), seed=0)
    model = kept.network(fresh, lambda m: train(m, planted.x, planted.y, how, seed=0, progress=options.progress))
    attacked = poison(asked.x, asked.y, patch=patch, target=TARGET, rate=1)
    x, z = planted.x.to(options.device), torch.cat([asked.x, attacked.x]).to(options.device)
    y, labels = (v.to(x.device) for v in (planted.y, torch.cat([asked.y, attacked.y])))
    network = outputs(model, z).double()
    grams = Grams(x, z, progress=options.progress)
    half = {"dtype": "float16"} if options.device == "cuda" else {}
    tangent, plain = kernels(model, options.kernels or None, **half), kernels(model, options.kernels or None)
    every = {name: (plain if name in ("Em", "CK") else tangent)[name] for name in tangent}
    for position, (name, kernel) in enumerate(every.items()):
        if name not in kept:
            train_gram, cross = grams(kernel)
            kept[name] = measure_kernel(train_gram, cross, y, network, labels, planted.mask, options)
        grams.forget(list(every.values())[position + 1 :])
    clean = len(asked)
    facts: Row = {
        "clean accuracy": accuracy(model, z[:clean], labels[:clean]),
        "attack succeeds": accuracy(model, z[clean:], labels[clean:]),
        "runs": dict(kept.rows),
    }
    columns = ("kernel", "precision %", "paper", "recall %", "paper ", "τ_K", "paper  ", "TAD %", "paper   ",
               "poisoned τ_K", "paper    ", "poisoned TAD %", "paper     ")  # fmt: skip
    title = (
        f"Table 3: forensics of a poisoned CNN ({100 * facts['clean accuracy']:.2f} % accurate on clean, "
        f"{100 * facts['attack succeeds']:.2f} % fooled on poisoned test images)"
    )
    published = {} if options.quick else TABLE3_PUBLISHED
    rows = tuple(table3_row(name, kept[name], published.get(name, ("",) * 6)) for name in every)
    return Table(title, columns, rows, TABLE3_NOTES, facts)


def measure_kernel(
    train_gram: Gram, cross: Gram, y: Tensor, network: Tensor, labels: Tensor, mask: Tensor, options: Options
) -> Row:
    """Flags, a surrogate, and its faithfulness on clean and on poisoned test images, which follow one another."""
    m = len(labels) // 2
    truth = torch.arange(2 * m, device=labels.device) >= m
    caught = detect(cross, mask, truth)
    made = fit(
        train_gram, y, reg=default_reg(train_gram, alpha=ALPHA), sample_weights="balanced", progress=options.progress
    )
    logits, parts = made.logits(cross), (slice(0, m), slice(m, None))
    clean, poisoned = (faithfulness(network[k], logits[k], labels[k], outputs_are="logits") for k in parts)
    return {
        "precision": caught.precision,
        "recall": caught.recall,
        "flagged": int(caught.flagged.sum()),
        "tau": clean.tau,
        "tad": clean.tad,
        "poisoned tau": poisoned.tau,
        "poisoned tad": poisoned.tad,
        "gradient": made.gradient,
        "steps": made.steps,
    }


def table3_row(name: str, facts: Row, published: tuple[str, ...]) -> Row:
    """One row of the table: ours beside what was published."""
    ours = (
        f"{100 * facts['precision']:.2f}", f"{100 * facts['recall']:.2f}", f"{facts['tau']:.3f}",
        f"{100 * facts['tad']:+.2f}", f"{facts['poisoned tau']:.3f}", f"{100 * facts['poisoned tad']:+.2f}",
    )  # fmt: skip
    names = ("precision %", "recall %", "τ_K", "TAD %", "poisoned τ_K", "poisoned TAD %")
    beside = {"paper" + " " * k: value for k, value in enumerate(published)}
    return {"kernel": name, **dict(zip(names, ours, strict=True)), **beside}
