"""Before the first use: two samples through the model, compared with plain autograd.

Found out here: whether the model is a deterministic function of one sample, and changes nothing that is not its own; in
which dimension of every layer's tensors the samples lie; and (`verify.py`) which parameters no rule covers, or are
covered wrongly; how much memory a sample takes. The reference is autograd on both samples together: for one sample
alone torch's own batch norm is wrong in some layouts.
"""

import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .. import errors
from .._base import tree
from .._base.types import Inputs, Params
from ..errors import ModelError, NonFiniteError
from .agreement import check_independent, check_outputs, close
from .capture import record
from .capture_plan import CapturePlan
from .examine import examine
from .fallback import private
from .layout import Layout
from .network import Network
from .recorder import Key, Recorder, Tap
from .verify import ROUNDINGS, SHRINKS, in_float64, verified


def probe(network: Network, x: Inputs) -> tuple[CapturePlan, bool]:
    """The plan for inputs like x, and whether two different samples were there to be certain of it."""
    # Two samples are the fewest that show where the samples lie, and whether one depends on the other.
    pair, second_one = tree.two_samples(x)
    first, second = tree.split(pair, 1)
    certain = second_one > 0
    state = network.state()
    writes = examine(network, state, pair)
    # A plan that knows nothing yet: recording needs one for what it may write to.
    plan = CapturePlan({}, {}, {}, {}, 1, 0, torch.float64, private=writes)
    try:
        runs = _Runs.of(network, state, plan, pair, first, second)
    except (RuntimeError, NotImplementedError) as e:
        if isinstance(e, torch.OutOfMemoryError) or not _from_torch(e):
            raise
        # The model runs, as was just seen, but not while it is recorded: a torch.func or autograd of its own inside.
        return _unrecorded(network, state, plan, pair), certain
    if runs.alone[0].unknown or runs.both.unknown:  # tensors that the model keeps somewhere are known from now on
        runs = _Runs.of(network, state, plan, pair, first, second)
    if copies := runs.copies():
        runs = _Runs.of(network, state, replace(plan, copies=copies), pair, first, second)
    narrowest = runs.both.narrowest
    try:
        check_outputs(runs.out)
    except NonFiniteError as e:
        raise e.shifted(second_one - 1 if e.sample == 1 else 0) from None
    if not close(runs.out, runs.again, narrowest) and not _only_rounded(network, pair, runs.out, runs.again, _again):
        raise ModelError(
            "the model gives different outputs for the same inputs, so it has no kernel. Turn its randomness off "
            "(model.eval(), or a fixed generator inside forward)."
        )
    alone = torch.cat(runs.outs_alone)
    # Of one sample twice a model that mixes them may give the same as of one alone.
    if certain and not close(runs.out, alone, narrowest) and not _only_rounded(network, pair, runs.out, alone, _alone):
        check_independent(runs.out, alone, narrowest)
    layouts, complete = runs.layouts()
    fallback = {k: f"used by {why}" for k, why in runs.both.unexplained.items()}
    plan = replace(
        plan,
        layouts=layouts,
        copies=copies,
        fallback=fallback,
        rules={k: tap.rule.name for tap in runs.both.taps for k in tap.names},
        c=runs.out.shape[1],
        calls=runs.both.calls,
        narrowest=narrowest,
        shield=runs.both.recomputes,
        measured=set() if complete else {runs.both.calls},
    )
    size = float(runs.out.norm())
    return verified(network, state, pair, plan, runs.bytes_saved, size, runs.both.routes), certain


Rerun = Callable[[Callable[[Inputs], Tensor], Inputs], Tensor]


def _again(run: Callable[[Inputs], Tensor], pair: Inputs) -> Tensor:
    """Both together once more: whether the model draws random numbers."""
    return run(pair)


def _alone(run: Callable[[Inputs], Tensor], pair: Inputs) -> Tensor:
    """Each alone: whether the model mixes them."""
    return torch.cat([run(tree.take(pair, slice(k, k + 1))) for k in range(2)])


def _only_rounded(network: Network, pair: Inputs, out: Tensor, other: Tensor, rerun: Rerun) -> bool:
    """Whether the outputs of two samples and those of another run differ by rounding and nothing else.

    A head may leave next to nothing of large outputs (logits that sum to 0), and then what is left is rounding. In
    float64 that shrinks with ε, and what a model really makes of the other samples does not. In float64 itself, it is
    what some roundings of the outputs before the head amount to.
    """
    if out.shape != other.shape:
        return False
    exact = replace(network, precision="float64")

    def run(x: Inputs) -> Tensor:
        """The outputs in float64."""
        with torch.enable_grad(), exact.modes(exact=True):  # hooks on activations want a graph
            return exact(exact.state(), private(x)).detach()

    try:
        wide = tree.cast(pair, torch.float64)
        apart = float((run(wide) - rerun(run, wide)).abs().max())
        if not in_float64(network):
            return apart <= SHRINKS * float((out - other).abs().max())
        return network.head is not None and apart <= ROUNDINGS * torch.finfo(out.dtype).eps * _height(network, pair)
    except (RuntimeError, TypeError, NotImplementedError):  # a model that insists on its own type
        return False


def _height(network: Network, pair: Inputs) -> float:
    """The largest output before the head."""
    plain, inputs = network.without_head(pair)
    with torch.enable_grad(), network.modes(exact=True):
        return float(plain(plain.state(), private(inputs)).detach().abs().max())


def _from_torch(e: BaseException) -> bool:
    """Whether it was raised by torch or by us, not by the model's own code."""
    last = traceback.extract_tb(e.__traceback__)[-1].filename
    return any(last.startswith(str(Path(module.__file__ or "").parent)) for module in (torch, errors))


def _unrecorded(network: Network, state: Params, plan: CapturePlan, pair: Inputs) -> CapturePlan:
    """A plan without rules: all parameters are in the fallback."""
    with torch.enable_grad(), network.modes(exact=True):  # it may take gradients itself
        out = network({**state, **network.leaves(state, network.trainable)}, private(pair)).detach()
    why = dict.fromkeys(network.trainable, "its model cannot be recorded")
    plan = replace(plan, fallback=why, c=out.shape[1], narrowest=out.dtype)
    check_outputs(out)
    # What the forward pass saves is unknown without a recording: 1 MiB (heuristic).
    return verified(network, state, pair, plan, 1 << 20, float(out.norm()))


@dataclass
class _Runs:
    """Both samples together, twice, and each alone."""

    out: Tensor  # [2, c]
    again: Tensor  # the same once more
    outs_alone: list[Tensor]  # [1, c] each
    both: Recorder
    alone: list[Recorder]
    bytes_saved: int  # what both together keep for the backward pass, parameters aside

    @staticmethod
    def of(network: Network, state: Params, plan: CapturePlan, pair: Inputs, *singles: Inputs) -> "_Runs":
        """The four forward passes, recorded."""

        def run(x: Inputs) -> tuple[Tensor, Recorder]:
            """One pass: its outputs, and what was recorded."""
            out, recorder = record(network, state, x, plan, differentiable=False, half=False, keep_outputs=True)
            recorder.check_unchanged()
            return out.detach(), recorder

        alone = [run(single) for single in singles]
        out, both = run(pair)
        saved: dict[int, int] = {}

        def pack(v: Tensor) -> Tensor:
            """Count what autograd keeps, each storage once."""
            if v.layout == torch.strided:
                saved[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
            return v

        own = {v.untyped_storage().data_ptr() for v in state.values()}
        try:
            with saved_tensors_hooks(pack, lambda v: v):
                again = run(pair)[0]
        except RuntimeError:  # torch.func inside of the model does not go with such hooks
            again = run(pair)[0]
            # Layers keep their input, and what lies between two layers keeps some more (heuristic: 4 outputs each).
            saved = {
                id(tap): 4 * tap.output.numel() * tap.output.element_size()
                for tap in both.taps
                if tap.output is not None
            }
        size = sum(size for place, size in saved.items() if place not in own)
        return _Runs(out, again, [o for o, _ in alone], both, [r for _, r in alone], size)

    def copies(self) -> dict[Hashable, Layout]:
        """Weights that grow with the batch: they hold a copy for every sample."""
        copies = {}
        for key, value in self.both.made.items():
            single = self.alone[0].made.get(key)
            if single is not None and single.shape != value.shape:
                layout = _layout(value, single, single, self.both.narrowest)
                if layout is not None:
                    copies[key] = layout
        return copies

    def layouts(self) -> tuple[dict[Key, Layout], bool]:
        """Where the samples lie in each use's tensors, and whether that was found for all of them."""
        layouts, complete = dict[Key, Layout](), True
        singles = [{tap.key: tap for tap in r.taps} for r in self.alone]
        for tap in self.both.taps:
            layout = self._layout_of(tap, *(s.get(tap.key) for s in singles))
            if layout is not None:
                layouts[tap.key] = layout
            else:
                complete = False  # the rows are traced to their samples in every batch
        return layouts, complete

    def _layout_of(self, tap: Tap, first: Tap | None, second: Tap | None) -> Layout | None:
        if first is None or second is None or first.output is None or second.output is None or tap.output is None:
            return None
        return _layout(tap.output, first.output, second.output, self.both.narrowest)


def _layout(both: Tensor, one: Tensor, two: Tensor, narrowest: torch.dtype) -> Layout | None:
    """The dimension in which the samples lie: it doubles with the batch, and its halves are the two samples'."""
    if not both.dim() == one.dim() == two.dim() or one.shape != two.shape:
        return None
    grown = [k for k in range(both.dim()) if both.shape[k] != one.shape[k]]
    if len(grown) != 1 or both.shape[grown[0]] != 2 * one.shape[grown[0]]:
        return None
    (dim,), size = grown, one.shape[grown[0]]
    halves = both.narrow(dim, 0, size), both.narrow(dim, size, size)
    if close(halves[0], one, narrowest) and close(halves[1], two, narrowest):
        return Layout(dim, size)
    turns = both.unflatten(dim, (size, 2))  # the samples take turns: [position, sample]
    if close(turns.select(dim + 1, 0), one, narrowest) and close(turns.select(dim + 1, 1), two, narrowest):
        return Layout(dim, size, major=False)
    return None
