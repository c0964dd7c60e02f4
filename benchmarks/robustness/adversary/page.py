"""The page docs/models.md and its picture, from the results of `run.py`.

python -m benchmarks.robustness.adversary.page
"""

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "adversary.json"
NAMED = ["hf_llama", "hf_gemma", "hf_mixtral", "hf_t5", "hf_beit", "hf_clip", "timm_nf_resnet", "lstm", "hf_mamba",
         "hf_bert", "hf_swin", "convnext", "hf_switch_transformers", "graph_gat"]  # fmt: skip
HEAD = """# Models of other people

What `tg.trace_ntk(model)` does on models that its authors did not choose: torchvision, timm, transformers, peft,
torch_geometric and odd hand-written ones, each at a tiny size, each against a plain autograd loop (every sample in a
batch of two, float64). Checked for each: trace, full and pseudo kernels, parts, diagonal, projected features, the
linearised network, float32, and that nothing of the model is changed. *Exact*: all errors below 1e-8 (1e-4 for models
that compute in float32 inside). *By rules*: parameters that need no pass per sample.
"""
FOOT = """
![how many times faster than a plain loop each model is](models.png)

Gain: time of a plain loop (one forward pass per sample, one backward pass per sample and output) over that of the
kernel, 24 samples, 5 outputs, float32, one thread, same process; second call, so that the probe is not counted. With it
(first call) the median gain is {first:.1f}. Made by `python -m benchmarks.robustness.adversary.run` and `page.py`
(results in `benchmarks/results/adversary.json`, commit {commit}).

The refused ones: {refused}.
"""


def gain(model: dict[str, Any], call: str = "second") -> float | None:
    seconds = model.get("seconds")
    return seconds["loop"] / seconds[call] if seconds else None


def gains(models: list[dict[str, Any]], call: str = "second") -> list[float]:
    return [g for m in models if (g := gain(m, call)) is not None]


def libraries(models: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(m["library"] for m in models))
    lines = ["| library | models | exact | refused | wrong or crashed | by rules alone | median gain | least gain |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name in [*names, "all"]:
        some = [m for m in models if name in (m["library"], "all")]
        exact, refused = (sum(m["verdict"] == v for m in some) for v in ("exact", "refused"))
        ruled = sum(m.get("rule_tensors") == 1 for m in some)
        found = gains(some)
        row = f"| {name} | {len(some)} | {exact} | {refused} | {len(some) - exact - refused} | {ruled} "
        lines.append(row + f"| {statistics.median(found):.1f} | {min(found):.1f} |")
    return lines


def named(models: list[dict[str, Any]]) -> list[str]:
    known = {m["name"]: m for m in models}
    lines = ["| model | gain |", "|---|---|"]
    return [*lines, *(f"| {n} | {gain(known[n]):.1f} |" for n in NAMED if n in known and gain(known[n]) is not None)]


def picture(models: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(m["library"] for m in models))
    figure, axes = plt.subplots(figsize=(8, 3.6))
    for k, name in enumerate(names):
        found = sorted(gains([m for m in models if m["library"] == name]))
        axes.plot([(j + 0.5) / len(found) + k for j in range(len(found))], found, ".", markersize=4)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(yscale="log", ylabel="plain loop / tangency", xticks=[k + 0.5 for k in range(len(names))])
    axes.set_xticklabels(names)
    axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    models = found["models"]
    refused = "; ".join(
        f"{m['name']} ({m['message'].split(': ', 1)[-1].split(',')[0]})" for m in models if m["verdict"] == "refused"
    )
    foot = FOOT.format(
        first=statistics.median(gains(models, "first")), commit=found["source"].split()[-1], refused=refused
    )
    page = [HEAD, *libraries(models), "", *named(models), foot]
    (ROOT / "docs" / "models.md").write_text("\n".join(page), encoding="utf-8")
    picture(models, ROOT / "docs" / "models.png")


if __name__ == "__main__":
    main()
