"""The gallery: every file of examples/gallery is run, and becomes a page with its picture, a notebook and a thumbnail.

An example is a script in `# %%` cells; comments that follow `# %% [markdown]` are its words, the first line its title.
It runs in a process of its own, and again only when it or the package has changed.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "gallery"
MADE = ROOT / ".gallery"
STYLE = Path(__file__).with_name("gallery.mplstyle")  # taste only: examples are as readable without
# What is shown first; others follow by name.
FIRST = ["explain_a_digit", "wrong_labels", "decision_surface", "poisoned_samples", "nearest_images", "three_grams"]
FIRST += ["checkpoints", "one_training_step", "spectral_bias", "linearised_by_width", "kernel_drift", "lazy_or_rich"]
FIRST += ["bulk_and_spikes", "anisotropy", "gaussian_process"]

RUN = f"""
import runpy, sys, matplotlib; matplotlib.use("agg")
import matplotlib.pyplot as plt, torch; torch.set_num_threads(1)
plt.style.use({str(STYLE)!r})
plt.show = lambda: None  # the figure is saved below
runpy.run_path(sys.argv[1], run_name="__main__")
assert len(plt.get_fignums()) == 1, f"{{sys.argv[1]}} left {{len(plt.get_fignums())}} figures; an example ends in one."
plt.savefig(sys.argv[2], dpi=130, facecolor="white")
"""


@dataclass(frozen=True)
class Cell:
    """Words or code, without the line that opened it."""

    words: bool
    text: str


@dataclass(frozen=True)
class Example:
    """One file, cut into cells."""

    path: Path
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def title(self) -> str:
        return self.cells[0].text.splitlines()[0].removeprefix("# ")

    @property
    def caption(self) -> str:
        """The first sentence after the title."""
        return " ".join(self.cells[0].text.splitlines()[1:]).strip().split(". ")[0].rstrip(".") + "."


def read(path: Path) -> Example:
    """Cut a file into cells; the first must be words that begin with a title."""
    cells = []
    for head, body in re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", path.read_text(encoding="utf-8"), re.MULTILINE):
        words = head.strip() == "[markdown]"
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if words else body
        cells.append(Cell(words, text.strip()))
    if not cells or not cells[0].words or not cells[0].text.startswith("# "):
        raise ValueError(f"{path} must begin with '# %% [markdown]' and then '# # Its title'.")
    return Example(path, tuple(cells))


def examples() -> list[Example]:
    """All of them, in the order in which they are shown."""
    place = {name: number for number, name in enumerate(FIRST)}
    paths = sorted(EXAMPLES.glob("*.py"), key=lambda path: (place.get(path.stem, len(place)), path.stem))
    return [read(path) for path in paths]


def digest(path: Path) -> str:
    """What a picture depends on: the example, the package, this file and the style."""
    found = hashlib.sha256(path.read_bytes() + Path(__file__).read_bytes() + STYLE.read_bytes())
    for source in sorted((ROOT / "src" / "tangency").rglob("*.py")):
        found.update(source.read_bytes())
    return found.hexdigest()


def run(example: Example) -> str:
    """Run an example, save its picture; what it printed."""
    command = [sys.executable, "-c", RUN, str(example.path), str(MADE / f"{example.name}.png")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{example.path} failed:\n{done.stderr}")
    return done.stdout


def notebook(example: Example) -> str:
    """The same cells for Jupyter."""
    cells: list[object] = []
    for number, cell in enumerate(example.cells):
        kind = "markdown" if cell.words else "code"
        entry = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": cell.text.splitlines(True)}
        cells.append(entry if cell.words else entry | {"execution_count": None, "outputs": []})
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def page(example: Example, printed: str) -> str:
    """Words, picture, code, output."""
    first, rest = example.cells[0], example.cells[1:]
    parts = [first.text, f"![{example.caption}]({example.name}.png){{ .gallery-picture }}"]
    parts += [cell.text if cell.words else f"```python\n{cell.text}\n```" for cell in rest]
    if printed.strip():
        parts.append(f"It prints\n\n```text\n{printed.strip()}\n```")
    parts.append(f"[Notebook]({example.name}.ipynb){{ download }} · [Script]({example.name}.py){{ download }}")
    return "\n\n".join(parts) + "\n"


def overview(shown: list[Example]) -> str:
    """The thumbnails."""
    cards = [
        f'<a class="gallery-card" href="{e.name}.html"><img src="{e.name}.png" alt="{e.title}" loading="lazy">'
        f"<strong>{e.title}</strong><span>{e.caption.replace('`', '')}</span></a>"
        for e in shown
    ]
    words = "Every picture was made by the code on its page when this site was built, on one CPU core in a few seconds."
    return f'---\nhide: [toc]\n---\n# Gallery\n\n{words}\n\n<div class="gallery">\n' + "\n".join(cards) + "\n</div>\n"


def build() -> None:
    """Make what is missing or out of date under .gallery."""
    MADE.mkdir(parents=True, exist_ok=True)
    shown = examples()
    for example in shown:
        seen = MADE / f".{example.name}.{digest(example.path)[:16]}"
        if not seen.exists():
            print(f"gallery: {example.name}", file=sys.stderr, flush=True)
            printed = run(example)
            (MADE / f"{example.name}.md").write_text(page(example, printed), encoding="utf-8")
            (MADE / f"{example.name}.ipynb").write_text(notebook(example), encoding="utf-8")
            (MADE / f"{example.name}.py").write_text(example.path.read_text(encoding="utf-8"), encoding="utf-8")
            for old in MADE.glob(f".{example.name}.*"):
                old.unlink()
            seen.touch()
    for path in MADE.iterdir():
        if path.name.lstrip(".").split(".")[0] not in {example.name for example in shown}:
            path.unlink()
    (MADE / "index.md").write_text(overview(shown), encoding="utf-8")
