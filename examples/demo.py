"""A small CNN on scikit-learn's digits: train it, compute its kernels, see what they say.

    python examples/demo.py --out demo

Writes demo/gram.png and demo/report.html. Under a minute on two cores.
"""

import argparse
import base64
import html
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tangency as tg
from tangency import plots

TRAIN = 600  # images whose Gram matrix is computed; the network is trained on twice as many


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(digits.images, dtype=torch.float32)[order, None] / 16
    y = torch.as_tensor(digits.target)[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 15) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def summary(kernel: tg.Kernel, x: Tensor, y: Tensor, test: Tensor, labels: Tensor) -> tuple[list[str], Tensor]:
    """Time, spectrum, alignment with the classes, and how well neighbours and ridge regression do by the kernel."""
    start = time.perf_counter()
    k = tg.compute(kernel, x).dense().double()
    cross = tg.compute(kernel, test, x).dense().double()
    seconds = time.perf_counter() - start
    values = torch.linalg.eigvalsh(k)
    same = F.one_hot(y).double() @ F.one_hot(y).double().T
    centred = k - k.mean(0) - k.mean(1, keepdim=True) + k.mean()
    target = same - same.mean(0) - same.mean(1, keepdim=True) + same.mean()
    alignment = float((centred * target).sum() / centred.norm() / target.norm())
    cosine = cross / k.diagonal().sqrt()
    accuracy = float((y[cosine.argmax(1)] == labels).double().mean())
    targets = F.one_hot(y).double() - 0.1
    regs = float(k.diagonal().mean()) * torch.logspace(-3, 2, 11, dtype=torch.float64)
    reg = tg.regress.cross_validate(k, targets, regs).best()
    said = tg.regress.ridge(k, targets, reg=reg).predict(cross).argmax(1)
    ridge = float((said == labels).double().mean())
    rank = float(values.sum() ** 2 / values.square().sum())
    share = float(values[-1] / values.sum())
    return [f"{seconds:.2f}", f"{share:.0%}", f"{rank:.1f}", f"{alignment:.3f}", f"{accuracy:.1%}", f"{ridge:.1%}"], k


def page(
    title: str, header: list[str], rows: list[list[str]], picture: bytes, explanation: str, accuracy: float
) -> str:
    def row(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    table = row(header, "th") + "".join(row(r, "td") for r in rows)
    encoded = base64.b64encode(picture).decode()
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }} th, td {{ padding: .3rem .6rem; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }} tr + tr {{ border-top: 1px solid #8884; }}
img {{ width: 100%; background: white; border-radius: .4rem; }} pre {{ overflow-x: auto; font-size: .8rem; }}
.wide {{ overflow-x: auto; }}
</style>
<h1>{title}</h1>
<p>A small convolutional network was trained on scikit-learn's digits (test accuracy {accuracy:.1%}). Below: its tangent
kernels between {TRAIN} training images, exact. A kernel says how strongly training on one image moves the network's
answer on another.</p>
<div class="wide"><table>{table}</table></div>
<p>λ₁ share: part of the trace in the largest eigenvalue. Effective rank: (Σλ)²/Σλ². Alignment: centred, with the matrix
of equal classes. 1-NN: test accuracy of the most similar training image under the kernel. Ridge: that of kernel ridge
regression, its regularisation chosen by leave-one-out on the training images.</p>
<h2>trNTK</h2><img alt="Gram matrix sorted by class, and its spectrum" src="data:image/png;base64,{encoded}">
<h2>How it was computed</h2><pre>{html.escape(explanation)}</pre></html>"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"))
    out = parser.parse_args().out
    torch.manual_seed(0)
    x, y, test, labels = data()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    print("training a small CNN on 1200 digits …")
    train(model, x, y)
    model.eval()
    accuracy = float((model(test).argmax(1) == labels).double().mean())
    print(f"test accuracy {accuracy:.1%}\n\nkernels between {TRAIN} training images:")
    kernels = {
        "trNTK (cosine of the trace)": tg.cosine(tg.trace_ntk(model)),
        "trNTK⁰ (trace over outputs)": tg.trace_ntk(model),
        "pNTK (pseudo)": tg.pseudo_ntk(model),
        "CK (conjugate)": tg.conjugate_kernel(model),
        "Em (embedding)": tg.embedding_kernel(model, layers=["1", "3", "6"]),
    }
    header = ["kernel", "seconds", "λ₁ share", "effective rank", "alignment", "1-NN", "ridge"]
    rows, grams = [], []
    for name, kernel in kernels.items():
        cells, k = summary(kernel, x[:TRAIN], y[:TRAIN], test, labels)
        rows.append([name, *cells])
        grams.append(k)
    for cells in [header, *rows]:
        print(f"  {cells[0]:30s}" + "".join(f"{c:>15s}" for c in cells[1:]))
    explanation = str(tg.trace_ntk(model).explain(x[:TRAIN]))
    print(f"\n{explanation}")
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "gram.png"
    plots.gram(grams[0], y[:TRAIN]).savefig(picture, dpi=130)
    report = out / "report.html"
    report.write_text(page("tangency demo", header, rows, picture.read_bytes(), explanation, accuracy))
    print(f"\npicture: {picture.resolve()}\nreport:  {report.resolve()}")


if __name__ == "__main__":
    main()
