"""Networks as libraries ship them, made wider and wider, come to the limit that `tg.infinite_ntk` reads off them.

    python -m benchmarks.studies.shipped [--only NAME] [--no-write]
    python -m benchmarks.studies.shipped --picture

Needs torchvision and transformers beside tangency (the picture: matplotlib). Eight networks at three widths each, by
the options of their own configuration (heads grow with the width); weights drawn anew as the limit supposes them. The
kernels of each draw are sums of plain autograd's gradients, which have nothing in common with the recursion: the
tangent kernel in the NTK parametrisation, a mean over the outputs, and the last layer's part of it, the covariance of
the outputs (NNGP) over that layer's weights. Told of each: the mean over draws less the limit along it,
⟨Θ_m, Θ⟩/⟨Θ, Θ⟩ − 1, with its standard error (of the draws, and of the limit where that is drawn); and the slope of
log(root mean square deviation of one draw) over log(width), −½ in theory. Writes results/shipped.json; --picture draws
it to results/shipped.png and docs/assets/shipped.png.
"""

import argparse
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import RESULTS, ROOT, save
from benchmarks.robustness.families import NanoGPT, Recurrent, images, stub_torchvision, tokens

Samples = Tensor | dict[str, Tensor]
B_VAR = 0.1
OUTPUTS = 2
SEEDS = 4  # of the limit, for its error


@dataclass(frozen=True)
class Case:
    """A network of any width, two samples, and how much is drawn."""

    name: str
    make: Callable[[int], nn.Module]
    x: Samples
    head: str  # the layer that gives the outputs
    widths: tuple[int, ...]
    draws: tuple[int, ...]  # of finite networks, by width
    samples: int = 4096  # of the limit
    w_var: float = 1.0
    values: dict[str, float] = field(default_factory=dict)  # variances of parameters that are used as values


@dataclass(frozen=True)
class Law:
    """How a parameter is drawn (variance None: it stays as it is), and how much its gradient counts."""

    variance: float | None
    rate: float


def laws(model: nn.Module, case: Case) -> dict[str, Law]:
    """The law of each parameter: w_var/fan-in, b_var, a norm's 1 and 0, or that of a parameter used as a value."""
    found = {}
    for name, p in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        kind = type(owner).__name__
        value = next((v for end, v in case.values.items() if name.endswith(end)), None)
        if value is not None:
            found[name] = Law(value or None, value or 1.0)
        elif "Norm" in kind:
            found[name] = Law(None, 1.0)
        elif "bias" in attribute:
            found[name] = Law(B_VAR, B_VAR)
        elif isinstance(owner, nn.Embedding):
            found[name] = Law(case.w_var, case.w_var)
        else:  # transformers' Conv1D has its weights as [in, out]
            fan_in = p.shape[0] if kind == "Conv1D" else p.shape[1] if isinstance(owner, nn.LSTM) else p[0].numel()
            if not isinstance(owner, (nn.Linear, nn.Conv2d, nn.LSTM, nn.MultiheadAttention)) and kind != "Conv1D":
                raise ValueError(f"{case.name}: what is {name}?")
            found[name] = Law(case.w_var / fan_in, case.w_var / fan_in)
    return found


def redraw(model: nn.Module, law: dict[str, Law], generator: torch.Generator) -> None:
    """All weights anew, in place."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            variance = law[name].variance
            if variance is not None:
                p.normal_(0.0, variance**0.5, generator=generator)


def outputs(model: nn.Module, x: Samples) -> Tensor:
    """[samples with their positions, outputs]."""
    given = model(**x) if isinstance(x, dict) else model(x)
    tensor: Tensor = given if isinstance(given, Tensor) else given[0]
    return tensor.flatten(0, -2)


def kernels(model: nn.Module, law: dict[str, Law], case: Case) -> tuple[Tensor, Tensor]:
    """The head's part of the tangent kernel and the whole [n, n], by plain autograd."""
    names, params = zip(*model.named_parameters(), strict=True)
    f = outputs(model, case.x)
    n, count = f.shape
    nngp, ntk = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    for c in range(count):
        rows = [torch.autograd.grad(f[i, c], params, retain_graph=True, allow_unused=True) for i in range(n)]
        for k, name in enumerate(names):
            if rows[0][k] is None:
                continue
            flat = torch.stack([row[k].flatten() for row in rows]).double()
            part = law[name].rate * flat @ flat.T / count
            ntk += part
            nngp += part if name.startswith(case.head + ".") else 0.0
    return nngp, ntk


def finite(case: Case, width: int, draws: int) -> Tensor:
    """Both kernels of `draws` networks [draws, 2, n, n]."""
    model = case.make(width).eval()
    law = laws(model, case)
    generator = torch.Generator().manual_seed(width)
    found = []
    for _ in range(draws):
        redraw(model, law, generator)
        found.append(torch.stack(kernels(model, law, case)))
    return torch.stack(found)


def limit(case: Case) -> Tensor:
    """Both kernels of the limit [seeds, 2, rows, rows]; one seed where nothing is drawn."""
    module = case.make(case.widths[0]).eval()
    if case.values:
        redraw(module, laws(module, case), torch.Generator().manual_seed(0))
    made: list[Tensor] = []
    for seed in range(SEEDS):
        k = tg.infinite_ntk(module, w_var=case.w_var, b_var=B_VAR, samples=case.samples, seed=seed)
        both = torch.stack(k.both(case.x))
        rows = math.isqrt(both[0].numel())  # samples, with their positions
        made.append(both.reshape(2, rows, rows))
        if seed == 1 and torch.equal(made[0], made[1]):
            return made[0].unsqueeze(0)
    return torch.stack(made)


def transformer(kind: str, **options: Any) -> nn.Module:
    """A network of Hugging Face from its configuration."""
    library = __import__("transformers")
    made = getattr(library, kind)
    return made(made.config_class(num_labels=OUTPUTS, **options))


def gpt2(width: int) -> nn.Module:
    """GPT-2 as a classifier of every token, two blocks."""
    sizes = {"n_embd": width, "n_head": width // HEAD, "n_layer": 2, "n_positions": 8, "vocab_size": 50}
    return transformer("GPT2ForTokenClassification", pad_token_id=0, bos_token_id=0, eos_token_id=1, **sizes)


def hidden(width: int) -> dict[str, int]:
    """The sizes that BERT and ViT call alike."""
    return {
        "hidden_size": width, "num_attention_heads": width // HEAD, "intermediate_size": 4 * width,
        "num_hidden_layers": 2,
    }  # fmt: skip


def bert(width: int) -> nn.Module:
    """BERT as a classifier, two blocks."""
    return transformer(
        "BertForSequenceClassification", vocab_size=50, max_position_embeddings=8, pad_token_id=0, **hidden(width)
    )


def vit(width: int) -> nn.Module:
    """ViT with four patches and a class token, two blocks."""
    return transformer("ViTForImageClassification", image_size=16, patch_size=8, **hidden(width))


def convnext(width: int) -> nn.Module:
    """ConvNeXt, two stages of one block."""
    sizes = {"hidden_sizes": [width, width], "depths": [1, 1], "num_stages": 2, "layer_scale_init_value": 1.0}
    return transformer("ConvNextForImageClassification", **sizes)


def mobilenet(width: int) -> nn.Module:
    """torchvision's, `width` hundredths as wide as it ships, with three of its seventeen blocks."""
    models = __import__("torchvision.models").models
    blocks = [[1, 16, 1, 1], [2, 24, 2, 2]]
    return models.MobileNetV2(num_classes=OUTPUTS, width_mult=width / 100, inverted_residual_setting=blocks)


def resnet18(width: int) -> nn.Module:
    """torchvision's with `width` in place of 64 channels: it has no option for it, so its layers are made anew."""
    model = __import__("torchvision.models").models.resnet18(num_classes=OUTPUTS)
    for path, layer in list(model.named_modules()):
        new: nn.Module | None = None
        if isinstance(layer, nn.Conv2d):
            inputs = 3 if layer.in_channels == 3 else layer.in_channels * width // 64
            kept = {"stride": layer.stride, "padding": layer.padding, "bias": False}
            new = nn.Conv2d(inputs, layer.out_channels * width // 64, layer.kernel_size, **kept)  # type: ignore[arg-type]
        elif isinstance(layer, nn.BatchNorm2d):
            new = nn.BatchNorm2d(layer.num_features * width // 64)
        elif isinstance(layer, nn.Linear):
            new = nn.Linear(layer.in_features * width // 64, OUTPUTS)
        if new is not None:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new)
    return model


HEAD = 16  # channels of each head: heads grow with the width
WORDS = tokens(mask=False, length=5)()
DEEP, MANY = (32, 128, 512), (64, 48, 48)
CASES = [
    Case("nanoGPT", lambda w: NanoGPT(w, w // HEAD, OUTPUTS), WORDS, "out", DEEP, MANY),
    Case("GPT-2 (transformers)", gpt2, tokens(mask=False, length=3)(), "classifier", DEEP, (48, 32, 24)),
    Case("BERT (transformers)", bert, tokens(length=5)(), "classifier", DEEP, MANY),
    Case(
        "ViT (transformers)", vit, {"pixel_values": images(16)()}, "classifier", DEEP, MANY,
        values={"cls_token": 1.0, "position_embeddings": 1.0},
    ),
    Case(
        "ConvNeXt (transformers)", convnext, {"pixel_values": images(16)()}, "classifier", (16, 64, 256), MANY,
        values={"layer_scale_parameter": 0.0},
    ),
    Case("MobileNetV2 (torchvision)", mobilenet, images(8)(), "classifier.1", (100, 400, 1600), MANY, 16384, w_var=2.0),
    Case("ResNet18 (torchvision)", resnet18, images(16)(), "fc", (16, 64, 128), (96, 96, 64)),
    Case("LSTM classifier", lambda w: Recurrent(nn.LSTM, w, w), WORDS, "out", (16, 64, 256), (192, 128, 64), 16384),
]  # fmt: skip


def slope(widths: tuple[int, ...], off: Tensor) -> float:
    """Of log(off) over log(width), by least squares."""
    logs = torch.stack([torch.tensor(widths, dtype=torch.float64), off]).log()
    centred = logs - logs.mean(1, keepdim=True)
    return float((centred[0] * centred[1]).sum() / centred[0].square().sum())


def compared(drawn: list[Tensor], made: Tensor, widths: tuple[int, ...]) -> dict[str, Any]:
    """What draws of one kernel [draws, rows, rows] at each width say of its limit, made by several seeds."""
    exact = made.mean(0)
    square = exact.square().sum()
    own = (made * exact).sum((1, 2)) / square
    error = float(own.std()) / len(own) ** 0.5 if len(own) > 1 else 0.0
    single = torch.stack([((d - exact).square().sum((1, 2)).mean() / square).sqrt() for d in drawn])
    along = [(d * exact).sum((1, 2)) / square for d in drawn]
    return {
        "limit's relative error": error,
        "deviation of one draw": [round(float(v), 4) for v in single],
        "slope": round(slope(widths, single), 3),
        "mean off": [round(float(v.mean()) - 1, 4) for v in along],
        "standard error": [round((float(v.var()) / len(v) + error**2) ** 0.5, 4) for v in along],
    }


def study(case: Case) -> dict[str, Any]:
    """One network: what its draws at all widths say of its limit."""
    began = time.perf_counter()
    made = limit(case)
    took = time.perf_counter() - began
    drawn = [finite(case, w, d) for w, d in zip(case.widths, case.draws, strict=True)]
    kernels = {
        name: compared([d[:, k] for d in drawn], made[:, k], case.widths) for k, name in enumerate(("nngp", "ntk"))
    }
    facts = {"network": case.name, "widths": list(case.widths), "draws": list(case.draws), "w_var": case.w_var}
    seconds = {"seconds": round(time.perf_counter() - began, 1), "of the limit": round(took, 1)}
    return facts | {"b_var": B_VAR, "samples": case.samples, "seeds": len(made)} | kernels | seconds


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each network: how far the mean is off at the largest width, and the slope."""
    lines = []
    for row in rows:
        cells = [f"{row['network']:26}", f"{row['widths'][-1]:5}"]
        for name in ("nngp", "ntk"):
            r = row[name]
            cells.append(f"{100 * r['mean off'][-1]:+6.1f} ± {100 * r['standard error'][-1]:3.1f} %  {r['slope']:+.2f}")
        lines.append("  ".join(cells) + f"  {row['seconds']:6.0f} s")
    return "\n".join([f"{'':33}  {'NNGP off, slope':25}{'NTK off, slope':25}", *lines])


def draw(rows: list[dict[str, Any]]) -> Any:
    """Deviations of single draws over the width, and of the mean at each width."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for k, row in enumerate(rows):
        times = [w / row["widths"][0] for w in row["widths"]]
        single = row["ntk"]["deviation of one draw"]
        left.loglog(times, single, "o-", ms=4, lw=1.2, label=f"{row['network']}: {row['ntk']['slope']:+.2f}")
        for j, (off, error) in enumerate(zip(row["ntk"]["mean off"], row["ntk"]["standard error"], strict=True)):
            at, shade = k + 0.2 * (j - 1), 0.35 + 0.325 * j
            right.errorbar(at, 100 * off, 200 * error, fmt="o", ms=4, color=f"C{k}", alpha=shade, capsize=2)
    ends = torch.tensor([1.0, 16.0])
    left.loglog(ends, 0.6 * ends**-0.5, color="gray", ls=":", label="width^-½")
    left.set(
        xlabel="width, times the smallest", ylabel="relative deviation of one draw", title="Tangent kernels: slopes"
    )
    left.set_xticks([1, 2, 4, 16], ["1", "2", "4", "16"])
    left.minorticks_off()
    left.set_ylim(bottom=0.02)
    left.legend(fontsize=7, loc="lower left")
    right.axhline(0, color="gray", lw=0.8)
    right.set_xticks(range(len(rows)), [row["network"].partition(" ")[0] for row in rows], rotation=30, fontsize=8)
    right.set(ylabel="mean over draws less the limit, %", title="± 2 standard errors; the darker the wider")
    return figure


def main() -> None:
    """All networks, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="networks whose name contains this; the results of others stay")
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--picture", action="store_true", help="draw what was measured, and measure nothing")
    options = parser.parse_args()
    if options.picture:
        figure = draw(json.loads((RESULTS / "shipped.json").read_text(encoding="utf-8"))["networks"])
        for path in (RESULTS / "shipped.png", ROOT / "docs" / "assets" / "shipped.png"):
            figure.savefig(path, dpi=110)
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    stub_torchvision()
    rows = []
    for case in CASES:
        if options.only.lower() in case.name.lower():
            rows.append(study(case))
            print(table(rows[-1:]), flush=True)
    if not options.no_write:
        # The others stay as they were measured before.
        path = RESULTS / "shipped.json"
        found = (
            {row["network"]: row for row in json.loads(path.read_text(encoding="utf-8"))["networks"]}
            if path.exists()
            else {}
        )
        found |= {row["network"]: row for row in rows}
        ordered = [found[case.name] for case in CASES if case.name in found]
        print(table(ordered))
        save({"networks": ordered}, path, "python -m benchmarks.studies.shipped")


if __name__ == "__main__":
    main()
