"""Feature maps: from inputs to per-sample gradients (or activations), one block per parameter.

`Jacobian` is the tangent features ∂f/∂θ. Before its first use on a kind of input it probes the model with two samples
(`probe.py`): that finds where the samples lie in every layer, refuses models that are random or mix samples, and
compares every rule with plain autograd; what does not fit goes through `torch.func`, and is said once.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .._base import tree
from .._base.memory import batch_budget, free_memory, keep_memory
from .._base.misfit import FAILURES, in_words, misfit
from .._base.types import Inputs, Params
from ..errors import MemoryBudgetError, ModelError, NonFiniteError, PerformanceWarning
from . import blocks
from .blocks import GradientBlock
from .capture import capture
from .capture_plan import CapturePlan, Unfamiliar
from .directions import Outputs
from .halving import kept_in_eight, quartered
from .micro_batches import put, put_formed
from .network import Network
from .probe import probe
from .rules import NoRule

# Samples at a time where a model loops over them: each sample's calls get room for all samples (heuristic).
TRACED = 64
# How often a batch is begun again because forward() made calls that were not known of it (heuristic): once for each
# kind of call is meant, and a model that makes others every time must end somewhere.
ATTEMPTS = 200
# A sample whose blocks take more than WHOLE bytes is captured by groups of outputs that take up to GROUP (heuristic).
# Large groups share a forward pass between more outputs; small ones let more samples meet in a tile, and so be captured
# fewer times.
WHOLE, GROUP = 1 << 28, 1 << 26

Form = Callable[[str], bool]


def every_parameter(name: str) -> bool:
    """The choice of all of them."""
    return True


class Features(ABC):
    """φ(x): one block of per-sample features per name."""

    network: Network

    @abstractmethod
    def __call__(
        self, x: Inputs, memory: int | None = None, form: Form = every_parameter, outputs: Outputs | None = None
    ) -> dict[str, GradientBlock]:
        """The blocks of x. `form` says of which parameters gradients may be formed where that saves memory; `outputs`:
        of these alone."""

    @abstractmethod
    def footprint(self, x: Inputs, form: Form = every_parameter) -> tuple[int, int]:
        """Bytes per sample: (kept in the blocks, transient while they are made), of one of the `groups`."""

    def groups(self, x: Inputs) -> tuple[Outputs, ...]:
        """Groups of outputs to be captured one after the other, where the blocks of all would be too large; else ()."""
        return ()


@dataclass(frozen=True, eq=False)
class Jacobian(Features):
    """Tangent features ∂f_c(x)/∂θ_p, in factored form."""

    network: Network
    plans: dict[Hashable, CapturePlan] = field(default_factory=dict, repr=False)  # by kind of input
    # The same where only one sample has been seen: that sample, and what it showed, until there is a second one.
    single: dict[Hashable, tuple[Inputs, CapturePlan]] = field(default_factory=dict, repr=False)

    said: set[object] = field(default_factory=set, repr=False)  # what users have been told once

    def __getstate__(self) -> dict[str, object]:
        """Without plans: every process finds out for itself, and so checks its own torch."""
        return {"network": self.network, "plans": {}, "single": {}, "said": set(self.said)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)

    def _key(self, x: Inputs) -> Hashable:
        """What may change the model's way: the kind of input, and the modes and flags of its modules."""
        # Attributes by which forward() may choose its way: modes, flags, numbers and words.
        flags = []
        for name, module in self.network.model.named_modules():
            for key, value in module.__dict__.items():
                if isinstance(value, (bool, int, float, str, type(None))):
                    flags.append((name, key, value))
        return tree.signature(x), tuple(flags)

    def plan(self, x: Inputs) -> CapturePlan:
        """What is known about the model on this kind of input; the first time, it is found out."""
        key = self._key(x)
        if key in self.plans:
            return self.plans[key]
        seen = x
        if key in self.single:
            first, plan = self.single[key]
            pairs = zip(tree.leaves(first), tree.leaves(x), strict=True)
            seen = tree.rebuild(x, [torch.cat([v, w.detach()]) for (_, v), (_, w) in pairs])
            if tree.two_samples(seen)[1] == 0:  # the very same sample again
                return plan
        try:
            with torch.inference_mode(False):
                plan, certain = probe(self.network, tree.normal(seen))
        except NonFiniteError as e:
            if seen is x:
                raise
            if e.sample > 0:
                raise e.shifted(-1) from None
            del self.single[key]  # finite when it was seen first: the weights are others now
            return self.plan(x)
        except FAILURES as e:
            # In the user's words where the samples are at fault, else as torch said it.
            refusal = misfit(e, x, "x", self.network.computes)
            if refusal is None or self._runs(x):  # fails on other samples than these: one alone, or two
                raise
            raise refusal from e
        if plan.fallback:
            self._say(plan)
        if certain:
            self.plans[key] = plan
            self.single.pop(key, None)
        else:  # another sample may show more: the two of them together will
            own = tree.transform(lambda v: v.detach().clone(), tree.take(x, slice(0, 1)))
            self.single[key] = own, plan
        return plan

    def _runs(self, x: Inputs) -> bool:
        """Whether the model can be run on all of x at once."""
        try:
            with torch.no_grad(), self.network.modes():
                self.network(self.network.state(), x)
        except FAILURES:
            return False
        return True

    def _say(self, plan: CapturePlan) -> None:
        """Warn of parameters that go through torch.func, each once."""
        known = [*self.plans.values(), *(p for _, p in self.single.values())]
        said = {name for p in known for name in p.fallback}
        new = {name: why for name, why in plan.fallback.items() if name not in said}
        if new:
            reasons = ", ".join(f"{name} ({why})" for name, why in list(new.items())[:6])
            more = f" and {len(new) - 6} more" if len(new) > 6 else ""
            warnings.warn(
                f"no structured rule covers {reasons}{more}: exact, but through torch.func, which is slower.",
                PerformanceWarning,
                stacklevel=5,
            )

    def footprint(self, x: Inputs, form: Form = every_parameter) -> tuple[int, int]:
        """As `Features.footprint`, as the probe weighed it."""
        plan, groups = self.plan(x), self.groups(x)
        plan = plan.for_outputs(groups[0].count) if groups else plan
        kept, transient = plan.kept, plan.transient
        sizes = {name: p.numel() for name, p in self.network.model.named_parameters()}
        for name, size in plan.saved.items():
            if form(name):  # a micro-batch has its factors first
                kept, transient = kept - size, transient + size
                entries = sizes[name]
                if self.network.eight and kept_in_eight(plan.c, entries):
                    kept -= plan.c * entries  # of two bytes one
        return kept, transient

    def groups(self, x: Inputs) -> tuple[Outputs, ...]:
        """As `Features.groups`; a network's sizes alone decide, so that every tile is the same sum."""
        plan = self.plan(x)
        step = plan.group(WHOLE, GROUP)
        return () if step == plan.c else tuple(Outputs(k, min(k + step, plan.c)) for k in range(0, plan.c, step))

    def __call__(
        self, x: Inputs, memory: int | None = None, form: Form = every_parameter, outputs: Outputs | None = None
    ) -> dict[str, GradientBlock]:
        """As `Features.__call__`, in micro-batches that fit into `memory` bytes (default: a part of what is free)."""
        for _ in range(ATTEMPTS):
            plan = self.plan(x)
            try:
                # Samples that the probe had not seen may not fit either: a word that is in no vocabulary.
                with torch.inference_mode(False), in_words(x, dtype=self.network.computes):
                    made = self._blocks(tree.normal(x), plan, memory, form, outputs)
                if not made:
                    raise ModelError(
                        "for these samples the outputs do not depend on any of the parameters that count, so the "
                        "kernel is zero. Check trainable=, and .detach(), .item() and .numpy() in the model."
                    )
                return made
            except NoRule as e:  # data-dependent control flow used a parameter in a way that the probe had not seen
                new = e.names - plan.fallback.keys()
                if not new:
                    raise
                plan = plan.without(new, "its use depends on the data")
                plan = replace(plan, looped=frozenset(plan.looped | new), company=True)
                self._say(plan)
                self.plans[self._key(x)] = plan
            except Unfamiliar as e:
                self.plans.pop(self._key(x), None)
                self.single.pop(self._key(x), None)
                plan = self.plan(x)
                self.plans[self._key(x)] = plan
                if e.calls != plan.calls:  # its calls depend on the batch
                    plan.measured.add(e.calls)
        raise ModelError(
            f"forward() calls other functions of torch each time that it runs on the same samples ({ATTEMPTS} times), "
            "so its gradients cannot be followed. Make it do the same for the same inputs."
        )

    def _blocks(
        self, x: Inputs, plan: CapturePlan, memory: int | None, form: Form, outputs: Outputs | None
    ) -> dict[str, GradientBlock]:
        """The blocks of x by this plan. Where gradients with respect to x are wanted, all in one batch."""
        keep_memory()
        network, differentiable = self.network, tree.needs_grad(x)
        if outputs is not None:
            network, plan = network.through(outputs), plan.for_outputs(outputs.count)
        state = network.state()
        device, n = next(iter(state.values())).device, tree.size(x)
        budget = memory or batch_budget(device)
        if memory is None:
            _check_room(n, plan, form, device)
        step = max(1, budget // max(1, plan.transient + plan.kept))
        step = min(step, TRACED) if plan.measured else step
        # Micro-batches about equal: a last one of few samples would cost as many launches as a full one.
        step = -(-n // -(-n // step))
        if differentiable:
            return capture(network, state, x, plan, differentiable=True)
        # While a GPU is at work on a micro-batch, the next one is begun: it is asked once, at the end, whether all went
        # well. If not, all are made again one by one, each as it needs it.
        largest: list[Tensor] = []
        whole = self._put_together(network, x, plan, form, state, step, largest)
        if largest and not float(torch.stack([v.to(largest[0]) for v in largest]).max()) < float("inf"):
            whole = self._put_together(network, x, plan, form, state, step, None)
        return {name: whole[name] for name in self.network.trainable if name in whole}

    def _put_together(
        self,
        network: Network,
        x: Inputs,
        plan: CapturePlan,
        form: Form,
        state: Params,
        step: int,
        largest: list[Tensor] | None,
    ) -> dict[str, GradientBlock]:
        """The blocks of x from micro-batches of `step` samples; `largest` as in `capture`."""
        n, whole = tree.size(x), dict[str, GradientBlock]()
        for start in range(0, n, step):
            some = x if step >= n else tree.take(x, slice(start, start + step))
            try:
                part = capture(network, state, some, plan, largest=largest)
            except NonFiniteError as e:
                raise e.shifted(start) from None
            # Gradients where they are smaller than their factors, for all batches alike, or tiles could not be paired.
            for name in list(part):
                block, form_it = part.pop(name), name in plan.saved and form(name)
                if form_it and (step >= n or self.network.eight):
                    block, form_it = blocks.formed(block), False
                    block = quartered(block) if self.network.eight else block
                into = put_formed if form_it else put
                whole[name] = block if step >= n else into(whole.get(name), block, start, n)
        return whole


def _check_room(n: int, plan: CapturePlan, form: Form, device: torch.device) -> None:
    """Refuse to make blocks of all samples at once that no memory has room for."""
    least = n * (plan.kept - sum(size for name, size in plan.saved.items() if form(name))) + plan.transient
    check_fits(
        least,
        device,
        f"the gradients of {n} samples at once, of {plan.c} output{'s' * (plan.c > 1)}, take",
        "Go by blocks: tg.compute(kernel, x, memory=…), or give fewer samples at a time. Fewer outputs take less: "
        "tg.pseudo_ntk, tg.head_ntk, tg.trace_ntk(model, probes=16).",
    )


def check_fits(size: int, device: torch.device, what: str, fix: str) -> None:
    """Refuse, before the work, what takes more bytes than there are."""
    room = free_memory(device)
    if size > room:
        raise MemoryBudgetError(f"{what} {size / 2**30:.3g} GiB, and {room / 2**30:.3g} GiB are free. {fix}")
