"""Draws docs/assets/which_kernel.svg, the decision chart; run it by hand after changing the questions.

Boxes have colours of their own, so that the chart reads on a light page and on a dark one; one column of questions and
one of answers, narrow enough for a telephone.
"""

from html import escape
from pathlib import Path

QUESTIONS = [
    (["What would a network", "of infinite width do,", "before any training?"], ["infinite_ntk", "infinite_nngp"]),
    (
        ["Are hidden layers enough:", "what the network sees,", "not how it would learn?"],
        ["conjugate_kernel", "embedding_kernel"],
    ),
    (["One number of the outputs:", "a logit, a margin, a loss?"], ["head_ntk"]),
    (["Do outputs couple: closed-", "form training of several", "outputs together?"], ["full_ntk"]),
    (["More samples than a Gram", "matrix can hold, or an", "index to search?"], ["projected"]),
    (["Many outputs, and a rougher", "answer will do?"], ["pseudo_ntk"]),
]
LAST = (["Everything else,", "explanations first"], ["trace_ntk", "cosine(trace_ntk)"])

WIDTH, LEFT, RIGHT, GAP, LINE, PAD = 400, 196, 150, 22, 17, 11


def box(x: float, y: float, w: float, lines: list[str], fill: str, mono: bool) -> str:
    """A rounded box with lines of text in its middle."""
    h = len(lines) * LINE + 2 * PAD
    family = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace" if mono else "system-ui,sans-serif"
    size = 12.5 if mono else 13
    first = y + PAD + LINE * 0.75
    spans = "".join(
        f'<text x="{x + w / 2}" y="{first + k * LINE}" text-anchor="middle" font-family="{family}" font-size="{size}" '
        f'fill="#14263b">{escape(line)}</text>'
        for k, line in enumerate(lines)
    )
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" fill="{fill}" stroke="#7d8ea3"/>{spans}'


def arrow(x1: float, y1: float, x2: float, y2: float, word: str) -> str:
    """A line with a head, and a word beside it."""
    place = (
        f'x="{(x1 + x2) / 2}" y="{y1 - 6}" text-anchor="middle"'
        if y1 == y2
        else f'x="{x1 + 7}" y="{(y1 + y2) / 2 + 4}"'
    )
    return (
        f'<path d="M{x1} {y1}L{x2} {y2}" stroke="#7d8ea3" stroke-width="1.6" marker-end="url(#head)"/>'
        f'<text {place} font-family="system-ui,sans-serif" font-size="12" fill="#7d8ea3">{word}</text>'
    )


def chart() -> str:
    """The whole drawing."""
    parts, y, middle = [], 2.0, 2 + LEFT / 2
    for lines, names in [*QUESTIONS, LAST]:
        h = len(lines) * LINE + 2 * PAD
        answer = y + (h - len(names) * LINE - 2 * PAD) / 2
        last = lines is LAST[0]
        parts.append(box(2, y, LEFT, lines, "#e6edf5" if not last else "#dcebdd", mono=False))
        parts.append(box(WIDTH - RIGHT - 2, answer, RIGHT, names, "#f7e3bd", mono=True))
        parts.append(arrow(LEFT + 2, y + h / 2, WIDTH - RIGHT - 5, y + h / 2, "" if last else "yes"))
        if not last:
            parts.append(arrow(middle, y + h, middle, y + h + GAP - 3, "no"))
        y += h + GAP
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#7d8ea3"/></marker></defs>'
    )
    title = "<title>Which kernel: questions from top to bottom, the kernel to the right of the first yes</title>"
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - GAP + 2:.0f}" role="img">'
    return frame + title + head + "\n".join(parts) + "</svg>\n"


if __name__ == "__main__":
    (Path(__file__).parents[1] / "assets" / "which_kernel.svg").write_text(chart(), encoding="utf-8")
