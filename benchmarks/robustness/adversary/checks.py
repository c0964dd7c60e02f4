"""What is asked of tangency about one model, and the verdict. `run.py` calls `examine` in its worker processes."""

import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import tangency as tg
from benchmarks.robustness.adversary.entry import Entry
from benchmarks.robustness.adversary.reference import Reference, by_autograd, call, in_single, mixing
from benchmarks.robustness.adversary.snapshot import Snapshot

SAMPLES = 6
TIMED = 24
EXACT = 1e-8
SINGLE = 1e-4  # models that compute in float32, and kernels in float32
COARSE = 1e-2  # a kernel in float32 against a loop in float32
FLOOR = 1e-12  # parts smaller than this share of the whole are compared with it
ORDER = ("crash", "wrong", "touched", "refused", "exact")

Result = dict[str, Any]


def examine(entry: Entry, timed: bool = True) -> Result:
    """Every check of one model. Never raises for what tangency does; a broken entry is reported as "faulty"."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    result: Result = {"name": entry.name, "library": entry.library, "expected": entry.expected}
    try:
        x = entry.inputs(SAMPLES, double=True)
        reference = by_autograd(entry.build(double=True), x, entry.outputs)
        result |= _about(entry, x, reference)
    except Exception as e:
        return result | {"verdict": "faulty", "message": _last(e)}
    checks: dict[str, Result] = {}
    bound = SINGLE if result["single"] else EXACT
    _in_double(entry, x, reference, bound, checks, result)
    _attempt(checks, "float32", lambda: _in_float(entry, reference))
    if timed:
        _attempt(checks, "timed", lambda: _timed(entry, result))
    return result | {"checks": checks} | verdict(checks)


def verdict(checks: Mapping[str, Result]) -> Result:
    """The worst of all checks; that a model cannot be linearised counts only if it is said in no good way."""
    counted = {name: c for name, c in checks.items() if not (name == "linearize" and c["verdict"] == "refused")}
    worst = min((c["verdict"] for c in counted.values()), key=ORDER.index)
    errors = [c["error"] for c in checks.values() if c.get("bound") == EXACT]
    found: Result = {"verdict": worst, "error": max(errors, default=None)}
    if worst != "exact":
        failed = {name: c for name, c in counted.items() if c["verdict"] == worst}
        said = [f"error {c['error']:.0e} " if "error" in c else "" for c in failed.values()]
        messages = [text + c.get("message", "") for text, c in zip(said, failed.values(), strict=True)]
        found |= {"check": ", ".join(failed), "message": messages[0]}
        found["also"] = sorted({c["verdict"] for c in counted.values()} - {worst, "exact"})
    return found


def _about(entry: Entry, x: Any, reference: Reference) -> Result:
    """Sizes, and whether the entry itself is fair: the same at every call, and each sample by itself."""
    finite = all(bool(j.isfinite().all()) for j in reference.jacobian.values())
    if not finite:
        raise ValueError("the reference is not finite")
    sizes = [j.shape[2] for j in reference.jacobian.values()]
    if not sizes or float(reference.trace().norm()) == 0:
        raise ValueError("the reference kernel is zero")
    return {
        "parameters": sum(sizes),
        "tensors": len(sizes),
        "outputs": reference.outputs.shape[1],
        "mixing": mixing(entry.build(double=True), x, entry.outputs),
        "single": in_single(entry.build(double=True), x, entry.outputs),
    }


def _in_double(
    entry: Entry, x: Any, reference: Reference, bound: float, checks: dict[str, Result], result: Result
) -> None:
    """All kernels in float64 of one model, which must be as it was at the end."""
    model = entry.build(double=True)
    before = Snapshot(model)
    options = {"outputs": entry.outputs}
    parts = _stripped(reference.parts())
    whole = float(sum(parts.values(), torch.zeros(())).norm())

    def compare(got: Tensor, want: Tensor) -> Result:
        return _compared(got, want, bound)

    def by_parts() -> Result:
        got = _stripped(tg.trace_ntk(model, **options).parts(x))
        unknown, missing = got.keys() - parts.keys(), {k for k in parts.keys() - got.keys() if parts[k].any()}
        if unknown or missing:
            return {"verdict": "wrong", "message": f"parts: unknown {sorted(unknown)}, missing {sorted(missing)}"}
        errors = {name: _compared(v, parts[name], bound, FLOOR * whole) for name, v in got.items()}
        worst = max(errors, key=lambda name: errors[name]["error"])
        return errors[worst] | ({} if errors[worst]["verdict"] == "exact" else {"message": f"the part of {worst}"})

    _attempt(checks, "trace", lambda: compare(tg.trace_ntk(model, **options)(x), reference.trace()))
    _attempt(checks, "full", lambda: compare(tg.full_ntk(model, **options)(x), reference.full()))
    _attempt(checks, "pseudo", lambda: compare(tg.pseudo_ntk(model, **options)(x), reference.pseudo()))
    _attempt(checks, "parts", by_parts)
    _attempt(checks, "diag", lambda: compare(tg.trace_ntk(model, **options).diag(x), reference.trace().diag()))
    _attempt(checks, "projected", lambda: _projected(model, x, entry.outputs))
    if result["mixing"] < SINGLE:  # else there is nothing to compare with
        _attempt(checks, "linearize", lambda: _linearized(model, x, entry.outputs, reference, bound))
    if checks["trace"]["verdict"] == "exact":
        result |= _shares(model, x, entry.outputs, reference)
    _attempt(checks, "untouched", lambda: _untouched(entry, model, x, reference, before, bound))


def _untouched(entry: Entry, model: nn.Module, x: Any, reference: Reference, before: Snapshot, bound: float) -> Result:
    """Nothing has changed but what a plain forward pass changes too, and plain autograd still gives the same."""
    other = entry.build(double=True)
    plain = Snapshot(other)
    with torch.no_grad():
        call(other, x, entry.outputs)
    changes = [change for change in before.changes(model) if change not in plain.changes(other)]
    try:
        again = by_autograd(model, x, entry.outputs)
        values = _compared(again.outputs, reference.outputs, bound)
        gradients = _compared(again.trace(), reference.trace(), bound)
        changes += ["its outputs differ afterwards"] if values["verdict"] != "exact" else []
        changes += ["its own gradients differ afterwards"] if gradients["verdict"] != "exact" else []
    except Exception as e:
        changes.append(f"plain autograd fails afterwards: {_last(e)}")
    return {"verdict": "touched" if changes else "exact", "message": "; ".join(changes)[:500]}


def _projected(model: nn.Module, x: Any, outputs: Any) -> Result:
    kernel = tg.projected(tg.pseudo_ntk(model, outputs=outputs), dim=64)
    phi = kernel.features(x)
    if phi.shape != (SAMPLES, 64) or not bool(phi.isfinite().all()):
        return {"verdict": "wrong", "message": f"features of shape {tuple(phi.shape)}, or not finite"}
    return _compared(kernel(x), phi @ phi.T, SINGLE)


def _linearized(model: nn.Module, x: Any, outputs: Any, reference: Reference, bound: float) -> Result:
    """Its value at θ0 is the model's, and it moves by J·δ."""
    net = tg.linearize(model, outputs=outputs)
    with torch.no_grad():
        start = call(net, x, lambda out: out)
        named = dict(net.model.named_parameters())
        names = _names(reference.jacobian, named)
        step = {name: torch.randn_like(named[own]) for name, own in names.items()}
        for name, own in names.items():
            named[own].add_(step[name])
        end = call(net, x, lambda out: out)
    value = _compared(start, reference.outputs, bound)
    tangent = _compared(end - start, reference.moved(step), bound)
    return value | {"message": "the value"} if value["verdict"] != "exact" else tangent | {"message": "the tangent"}


def _in_float(entry: Entry, reference: Reference) -> Result:
    """float32 against float64; where that is far off, no farther than a loop in float32 is."""
    model, x = entry.build(), entry.inputs(SAMPLES)
    want = reference.trace()
    found = _compared(tg.trace_ntk(model, outputs=entry.outputs)(x).double(), want.double(), SINGLE)
    if found["verdict"] == "wrong":
        loop = by_autograd(entry.build(), x, entry.outputs).to(torch.float64).trace()
        allowed = 10 * _compared(loop, want.double(), SINGLE)["error"]
        return _compared(tg.trace_ntk(model, outputs=entry.outputs)(x).double(), want.double(), max(allowed, SINGLE))
    return found


def _timed(entry: Entry, result: Result) -> Result:
    """Seconds of the first and the second call and of a plain loop, float32; and whether they agree."""
    model, x = entry.build(), entry.inputs(TIMED)
    kernel = tg.trace_ntk(model, outputs=entry.outputs)
    first, _ = _clock(lambda: kernel(x))
    second, got = _clock(lambda: kernel(x))
    loop, want = _clock(lambda: by_autograd(model, x, entry.outputs, pairs=False).trace())
    result["seconds"] = {"first": first, "second": second, "loop": loop}
    found = _compared(got.double(), want.double(), COARSE)
    if found["verdict"] == "wrong":  # torch's own gradients are wrong for some batches of one (timm_xcit)
        want = by_autograd(model, x, entry.outputs).trace()
        result["loop_error"] = found["error"]
        return _compared(got.double(), want.double(), COARSE)
    return found


def _clock(f: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    value = f()
    return time.perf_counter() - start, value


def _shares(model: nn.Module, x: Any, outputs: Any, reference: Reference) -> Result:
    """How many parameters, and entries of them, went by rules."""
    sizes = {name: j.shape[2] for name, j in _stripped(reference.jacobian).items()}
    used = [row for row in tg.trace_ntk(model, outputs=outputs).costs(x).rows if row.rule != "unused"]
    slow = [_strip(row.parameter) for row in used if row.rule == "torch.func"]
    entries = sum(sizes[_strip(row.parameter)] for row in used)
    return {
        "rule_tensors": 1 - len(slow) / max(len(used), 1),
        "rule_entries": 1 - sum(sizes[name] for name in slow) / max(entries, 1),
        "fallback": slow[:20],
    }


def _compared(got: Tensor, want: Tensor, bound: float, floor: float = 0.0) -> Result:
    if got.shape != want.shape:
        return {"verdict": "wrong", "error": float("inf"), "message": f"{tuple(got.shape)} for {tuple(want.shape)}"}
    difference, size = (got - want).norm(), max(float(want.norm()), floor, 1e-300)
    error = float(difference) / size
    return {"verdict": "exact" if error < bound else "wrong", "error": error, "bound": bound}


@contextmanager
def _judged(checks: dict[str, Result], name: str) -> Iterator[None]:
    try:
        yield
    except tg.TangencyError as e:
        checks[name] = {"verdict": "refused", "message": f"{type(e).__name__}: {e}"}
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        checks[name] = {"verdict": "crash", "message": f"{_last(e)} ({place})"}


def _attempt(checks: dict[str, Result], name: str, check: Callable[[], Result]) -> None:
    with _judged(checks, name):
        checks[name] = check()


def _last(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:400]}"


def _strip(name: str) -> str:
    """A parameter's name without what torch.compile and DataParallel put in it."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def _stripped(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_strip(name): value for name, value in named.items()}


def _names(wanted: Mapping[str, Tensor], own: Mapping[str, Any]) -> dict[str, str]:
    """The names that a copy of the model has for the same parameters."""
    found = {_strip(name): name for name in own}
    return {name: found[_strip(name)] for name in wanted}
