"""What is not on the page as it was given, or not at all, in words."""

from ..auditing import Audit
from ..decisions import Decisions
from .audit_content import OUTLIERS, Frame, whole
from .content import CHOSEN, CLASSES, CONFUSED, FLIERS, MATRIX


def of_decisions(d: Decisions | None, length: int, longest: int) -> list[str]:
    """Of decisions, whose lists have this length instead of the longest."""
    if d is None:
        return []
    notes = [
        *([d.outputs_said] if d.outputs_said else []),
        "Box plots and outliers are drawn to 1/65,000 of their range; every printed number is kept in 32 bits.",
    ]
    if length < longest:
        notes.append(
            f"Each list shows {length} training samples instead of {longest}, so that the page stays below its "
            "limit of bytes. A larger limit= shows them all."
        )
    t = d.explanations[0].attribution.boxes.shape[2]
    if max(t, d.logits.shape[1]) > CLASSES:
        notes.append(
            f"There are more than {CLASSES} classes: for each sample the {CHOSEN} with the largest probability, or the "
            "largest sum of attributions, are shown."
            + (f" The confusion matrix has the {CONFUSED} with most mistakes." if d.logits.shape[1] > MATRIX else "")
        )
    outliers = max(e.attribution.fliers.shape[3] for e in d.explanations)
    if outliers > FLIERS:
        notes.append(f"Of {outliers} outliers of each box the {FLIERS} farthest are drawn.")
    return notes


def of_audit(a: Audit | None, frame: Frame | None) -> list[str]:
    """Of an audit, of which so much is shown."""
    if a is None or frame is None:
        return []
    notes, everything = [], whole(a)
    if frame.suspects < everything.suspects:
        notes.append(
            f"{frame.suspects} suspects are listed instead of {everything.suspects}, so that the page stays below its "
            "limit of bytes. A larger limit= shows them all."
        )
    if frame.neighbours < everything.neighbours:
        notes.append(
            f"Each suspect has {frame.neighbours} neighbours instead of {everything.neighbours}, for the same limit."
        )
    if a.train.ids is not None and not frame.ids:
        notes.append("Names are there of the samples on the page alone, so that it stays below its limit of bytes.")
    if a.suspects.count > everything.suspects:
        notes.append(
            f"{a.suspects.count:,} are more likely wrong than right; the {everything.suspects:,} most suspicious are "
            "listed. tg.audit(…, samples=…) lists more."
        )
    lists = [("pairs of copies", len(a.copies), frame.others), ("outliers", len(a.support.outliers), OUTLIERS)]
    if a.leaks is not None and a.test_support is not None:
        lists += [("leaks", len(a.leaks), frame.others), ("test outliers", len(a.test_support.outliers), OUTLIERS)]
    for what, count, most in lists:
        if count > min(most, frame.others):
            notes.append(f"Of {count:,} {what} the first {min(most, frame.others)} are shown.")
    if len(a.train.classes) > MATRIX:
        notes.append(f"Of {len(a.train.classes)} classes the {CONFUSED} that are mixed up most are in the matrix.")
    return notes
