"""What a page is made of, checked: it may be put together by hand."""

import torch

from .._base import checks
from ..auditing import Audit
from ..decisions import Decisions
from ..errors import InputError


def parts(result: object, audit: object) -> tuple[Decisions | None, Audit | None]:
    """Decisions, an audit, or both, that belong together."""
    if audit is not None and not isinstance(audit, Audit):
        raise InputError(f"audit is a {type(audit).__name__}; needed: tangency.auditing.Audit, as tg.audit makes it.")
    if isinstance(result, Audit):
        if audit is not None:
            raise InputError(
                "two audits were given; needed: write(audit, path), or write(decisions, path, audit=audit)."
            )
        _check_audit(result)
        return None, result
    if not isinstance(result, Decisions):
        raise InputError(
            f"result is a {type(result).__name__}; needed: tangency.decisions.Decisions, as tg.explain makes them, or "
            "tangency.auditing.Audit, as tg.audit makes it, or tangency.representations.Shift, as tg.shift makes it."
        )
    _check_decisions(result)
    if audit is not None:
        _check_audit(audit)
        _check_together(result, audit)
    return result, audit


def _check_decisions(d: Decisions) -> None:
    """Refuse decisions that do not belong together."""
    if not d.explanations:
        raise InputError("the decisions have no explanations; needed: at least one kernel.")
    if d.logits.dim() != 2 or d.logits.shape[1] < 2:
        raise InputError(f"logits has shape {tuple(d.logits.shape)}; needed: [m, c] with at least two classes.")
    m, s = len(d.test.y), len(d.shown)
    if s == 0:
        raise InputError("no sample is to be explained (shown is empty); needed: at least one.")
    if bool(((d.shown < 0) | (d.shown >= m)).any()):
        raise InputError(f"shown goes from {int(d.shown.min())} to {int(d.shown.max())}; there are {m} test samples.")
    if len(torch.unique(d.shown)) < s:
        raise InputError("shown names a test sample twice; needed: each once.")
    names = [e.name for e in d.explanations]
    if len(set(names)) < len(names):
        raise InputError(f"two explanations have one name: {checks.some(names)}; needed: different names.")
    for what, logits in [("the network", d.logits), *((e.name, e.logits) for e in d.explanations)]:
        if len(logits) != m:
            raise InputError(f"{what} has logits of {len(logits)} samples; there are {m} test samples.")
        checks.finite(logits, f"the logits of {what}")
    for e in d.explanations:
        if len(e.attribution.outputs) != s:
            raise InputError(f"{e.name} explains {len(e.attribution.outputs)} samples; shown names {s}. Give as many.")


def _check_audit(a: Audit) -> None:
    """Refuse an audit that does not belong together."""
    n = len(a.train)
    if len(a.suspects.given) != n:
        raise InputError(f"the audit has labels of {len(a.suspects.given)} samples; its training set has {n}.")
    if len(a.listed) and not 0 <= int(a.listed.min()) <= int(a.listed.max()) < n:
        raise InputError(f"the audit lists sample {int(a.listed.max())}; its training set has {n}.")


def _check_together(d: Decisions, a: Audit) -> None:
    """One number must mean one sample, and one class, in both."""
    if a.real:
        raise InputError("audit is about real targets, the decisions are about classes; write a page of each.")
    if len(a.train) != len(d.train) or (a.test is not None and len(a.test) != len(d.test)):
        sizes = [f"{len(v.train)} and {0 if v.test is None else len(v.test)}" for v in (a, d)]
        raise InputError(
            f"audit is about {sizes[0]} training and test samples, the decisions about {sizes[1]}; needed: the same "
            "data sets, or a page of each."
        )
    if a.train.classes != d.train.classes:
        raise InputError(
            f"audit has the classes {checks.some(list(a.train.classes))}, the decisions "
            f"{checks.some(list(d.train.classes))}; needed: the same, in the same order."
        )
