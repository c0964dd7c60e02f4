"""Feature maps: from inputs to per-sample gradients (or activations), one block per parameter.

`Jacobian` is the tangent features ∂f/∂θ. Before its first use on a kind of input it probes the model with two samples
(`probe.py`): that finds where the samples lie in every layer, refuses models that are random or mix samples, and
compares every rule with plain autograd; what does not fit goes through `torch.func`, and is said once.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.memory import batch_budget
from .._base.types import Inputs, Params
from ..errors import InputError, ModelError, NonFiniteError, PerformanceWarning
from . import blocks, borrow
from .blocks import Block, Dense
from .jacobian import Plan, Unfamiliar, capture
from .network import Network
from .probe import probe
from .recorder import Recorder
from .rules import NoRule

# Samples at a time where a model loops over them: each sample's calls get room for all samples (heuristic).
TRACED = 64

Form = Callable[[str], bool]


def _all(name: str) -> bool:
    return True


def _normal(x: Inputs) -> Inputs:
    """x without tensors that were made in inference mode, which autograd refuses."""
    return tree.transform(lambda v: v.clone() if v.is_inference() else v, x)


class Features(ABC):
    """φ(x): one block of per-sample features per name."""

    network: Network

    @abstractmethod
    def __call__(self, x: Inputs, memory: int | None = None, form: Form = _all) -> dict[str, Block]:
        """The blocks of x. `form` says of which parameters gradients may be formed where that saves memory."""

    @abstractmethod
    def footprint(self, x: Inputs, form: Form = _all) -> tuple[int, int]:
        """Bytes per sample: (kept in the blocks, transient while they are made)."""


@dataclass(frozen=True, eq=False)
class Jacobian(Features):
    """Tangent features ∂f_c(x)/∂θ_p, in factored form."""

    network: Network
    plans: dict[Any, Plan] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without plans: every process finds out for itself, and so checks its own torch."""
        return {"network": self.network, "plans": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _key(self, x: Inputs) -> Any:
        """What may change the model's way: the kind of input, and the modes and flags of its modules."""
        return tree.signature(x), borrow.switches(self.network.model)

    def plan(self, x: Inputs) -> Plan:
        """What is known about the model on this kind of input; the first time, it is found out."""
        key = self._key(x)
        if key not in self.plans:
            try:
                with torch.inference_mode(False):
                    plan, certain = probe(self.network, _normal(x))
            except RuntimeError as e:
                said = checks.misfit(e, x, "x", next(self.network.model.parameters()).dtype)
                if said is None or self._runs(x):  # fails on other samples than these: one alone, or two
                    raise
                raise said from e
            self._say(plan)
            if not certain:
                return plan
            self.plans[key] = plan
        return self.plans[key]

    def _runs(self, x: Inputs) -> bool:
        try:
            with torch.no_grad(), self.network.modes():
                self.network(self.network.state(), x)
        except RuntimeError:
            return False
        return True

    def _probed_again(self, x: Inputs) -> Plan:
        self.plans.pop(self._key(x), None)
        plan = self.plan(x)
        self.plans[self._key(x)] = plan
        return plan

    def _say(self, plan: Plan) -> None:
        said = {name for p in self.plans.values() for name in p.fallback}
        new = {name: why for name, why in plan.fallback.items() if name not in said}
        if new:
            reasons = ", ".join(f"{name} ({why})" for name, why in list(new.items())[:6])
            more = f" and {len(new) - 6} more" if len(new) > 6 else ""
            warnings.warn(
                f"no structured rule covers {reasons}{more}: exact, but through torch.func, which is slower.",
                PerformanceWarning,
                stacklevel=5,
            )

    def footprint(self, x: Inputs, form: Form = _all) -> tuple[int, int]:
        plan = self.plan(x)
        saved = sum(size for name, size in plan.saved.items() if form(name))
        return plan.kept - saved, plan.transient + saved  # a micro-batch has its factors first

    def __call__(self, x: Inputs, memory: int | None = None, form: Form = _all) -> dict[str, Block]:
        with torch.inference_mode(False):
            x = _normal(x)
            while True:
                plan = self.plan(x)
                try:
                    return self._blocks(x, plan, memory, form)
                except NoRule as e:  # data-dependent control flow used a parameter in a way that the probe had not seen
                    if not e.names - plan.fallback.keys():
                        raise
                    again = plan.without(e.names - plan.fallback.keys(), "its use depends on the data")
                    looped = again.looped | (e.names - plan.fallback.keys())
                    again = replace(again, looped=frozenset(looped), company=True)
                    self._say(again)
                    self.plans[self._key(x)] = again
                except Unfamiliar as e:
                    again = self._probed_again(x)
                    if e.calls != again.calls:  # its calls depend on the batch
                        again.measured.add(e.calls)

    def _blocks(self, x: Inputs, plan: Plan, memory: int | None, form: Form) -> dict[str, Block]:
        differentiable = tree.needs_grad(x)
        state = self.network.state()
        budget = memory or batch_budget(next(iter(state.values())).device)
        n = tree.size(x)
        step = max(1, budget // max(1, plan.transient + plan.kept))
        step = min(step, TRACED) if plan.measured else step
        step = -(-n // -(-n // step))  # micro-batches about equal
        if differentiable:
            return capture(self.network, state, x, plan, differentiable=True)
        if step >= n:
            found = capture(self.network, state, x, plan)
            return {name: self._kept(name, found.pop(name), plan, form) for name in list(found)}
        whole: dict[str, Block] = {}
        for k, part in enumerate(tree.split(x, step)):
            try:
                found = capture(self.network, state, part, plan)
            except NonFiniteError as e:
                raise e.shifted(k * step) from None
            for name in list(found):
                block = self._kept(name, found.pop(name), plan, form)
                whole[name] = blocks.put(whole.get(name), block, k * step, n)
        return {name: whole[name] for name in self.network.train if name in whole}

    @staticmethod
    def _kept(name: str, block: Block, plan: Plan, form: Form) -> Block:
        """Gradients where the plan says that they are smaller (for all batches alike), else what was captured."""
        return blocks.formed(block) if name in plan.saved and form(name) else block


@dataclass(frozen=True, eq=False)
class Hidden(Features):
    """Activations of layers, flattened per sample: blocks [n, 1, p], one per layer.

    With `layers=None` it is the input of the last linear or convolutional layer. `bias` adds the constant feature 1.
    """

    network: Network
    layers: tuple[str, ...] | None
    bias: bool

    def footprint(self, x: Inputs, form: Form = _all) -> tuple[int, int]:
        found = self._blocks(tree.take(x, slice(0, 1)))
        kept = sum(b.nbytes for b in found.values())
        return kept, 8 * kept + 64 * sum(v[0].numel() * v.element_size() for _, v in tree.leaves(x))

    def __call__(self, x: Inputs, memory: int | None = None, form: Form = _all) -> dict[str, Block]:
        differentiable = tree.needs_grad(x)
        if differentiable:
            return self._blocks(x)
        kept, transient = self.footprint(x)
        device = next(self.network.model.parameters()).device
        step = max(1, (memory or batch_budget(device)) // max(1, kept + transient))
        whole: dict[str, Block] = {}
        for k, part in enumerate(tree.split(x, step)):
            for name, block in self._blocks(part).items():
                whole[name] = blocks.put(whole.get(name), block, k * step, tree.size(x))
        return whole

    def _blocks(self, x: Inputs) -> dict[str, Block]:
        n, state = tree.size(x), self.network.state()
        with torch.set_grad_enabled(tree.needs_grad(x)), self.network.modes(differentiable=tree.needs_grad(x)):
            values = self._last(state, x) if self.layers is None else self._named(state, x, self.layers)
        found: dict[str, Block] = {}
        for name, z in values.items():
            if z.dim() == 0 or z.shape[0] != n:
                raise ModelError(
                    f"layer {name} gives a tensor of shape {tuple(z.shape)} for {n} samples; needed: the sample in the "
                    "leading dimension. Choose another layer."
                )
            found[name] = Dense(z.reshape(n, 1, -1))
        if self.bias:
            some = next(iter(values.values()))
            found["1"] = Dense(some.new_ones(n, 1, 1))
        return found

    def _last(self, state: Params, x: Inputs) -> dict[str, Tensor]:
        own = {k for k, _ in self.network.model.named_parameters()}
        recorder = Recorder({k: v for k, v in state.items() if k in own}, tree.size(x))
        self.network(state, x, recorder)
        for tap in reversed(recorder.taps):
            if tap.rule.name in ("linear", "conv") and tap.weight is not None and tap.input is not None:
                return {f"input of {tap.weight.sources[0].removesuffix('.weight')}": tap.input}
        raise InputError(
            "no linear or convolutional layer was found, so there is no last hidden layer to take. Name one: layer='…'."
        )

    def _named(self, state: Params, x: Inputs, layers: tuple[str, ...]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            def hook(module: nn.Module, args: Any, out: Any) -> None:
                values[name] = _first_tensor(out, name)

            return hook

        handles = [self.network.model.get_submodule(name).register_forward_hook(keep(name)) for name in layers]
        try:
            self.network(state, x)
        finally:
            for handle in handles:
                handle.remove()
        silent = [name for name in layers if name not in values]
        if silent:
            raise InputError(f"layer(s) {checks.some(silent)} were not called by the model. Choose others.")
        return {name: values[name] for name in layers}


def _first_tensor(out: Any, name: str) -> Tensor:
    if isinstance(out, Tensor):
        return out
    if isinstance(out, (tuple, list)) and out and isinstance(out[0], Tensor):
        return out[0]
    first = getattr(out, "last_hidden_state", None)
    if isinstance(first, Tensor):
        return first
    raise InputError(f"layer {name} returns a {type(out).__name__}; needed: a tensor. Choose another layer.")


def layer_names(model: nn.Module, layers: str | Sequence[str]) -> tuple[str, ...]:
    """The chosen layers, checked against the model's modules."""
    names = (layers,) if isinstance(layers, str) else tuple(layers)
    known = [n for n, _ in model.named_modules() if n]
    for name in names:
        if name not in known:
            raise InputError(
                f"the model has no layer {name!r}.{checks.suggest(str(name), known)} It has {checks.some(known)}."
            )
    if not names:
        raise InputError("no layer was named; needed: at least one of the model's modules.")
    return names


def default_layers(model: nn.Module) -> tuple[str, ...]:
    """The blocks that a model is made of, without its last: its children, or those of an only child.

    What follows the last parameters (a softmax, a reshape) belongs to the last block, if there is another one.
    """
    prefix, level = "", model
    while True:
        children = list(level.named_children())
        blocks = list(children)
        while blocks and next(blocks[-1][1].parameters(), None) is None:
            blocks.pop()
        if len(blocks) != 1 or next(blocks[0][1].children(), None) is None:
            chosen = blocks if len(blocks) > 1 else children
            return tuple(prefix + name for name, _ in chosen[:-1])
        prefix, level = f"{prefix}{blocks[0][0]}.", blocks[0][1]
