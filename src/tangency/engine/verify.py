"""The plan compared with plain autograd on two samples: what differs goes to the fallback, which is compared too."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from .._base import tree
from .._base.types import Inputs, Params
from ..errors import ModelError
from .agreement import FITS
from .blocks import DenseBlock, GradientBlock
from .capture import by_rules, record
from .capture_plan import CapturePlan, Sizes, Unfamiliar
from .directions import Spread, contracted
from .fallback import autograd_reference, jacobian_loop, jacobian_vmap
from .network import Network
from .rules import NoRule

# So many roundings a number may differ by that others cancelled in (heuristic; sums of some million terms).
ROUNDINGS = 1000
# By so much at least a difference that is rounding shrinks from float32 to float64 (heuristic; ε shrinks by 2e-9).
SHRINKS = 1e-6


def verified(
    network: Network, state: Params, pair: Inputs, plan: CapturePlan, saved: int, size: float, reaches: bool = False
) -> CapturePlan:
    """The plan after a comparison of Jᵀv with autograd: what differs goes to the fallback, which is compared too.

    Of many outputs a few are compared, and a few sums of all: gradients are linear in the outputs, and rules do not
    know which they are at. `saved`: bytes that the forward pass of both samples keeps. `size`: the norm of the outputs,
    whose rounding reaches every gradient. `reaches`: data decide the way, so that other samples may reach parameters
    that these two do not.
    """
    network = network.through(Spread())
    reference = _Reference.of(network, state, pair, plan.shield, size)
    if reference.total == 0 and len(reference.unused) == len(network.trainable) and not reaches:
        raise ModelError(
            "the outputs do not depend on any of the parameters that count, so the kernel is zero. Check trainable=, "
            "torch.no_grad() and .detach() in the model."
        )
    _check_kept(network, reference.unused)
    # Each round takes away one reason for a difference: a rule that cannot be used, recomputed parts, calls that differ
    # from run to run, rows that are not where they seem; only then a rule is taken for wrong.
    traced = bool(plan.measured)
    blocks: dict[str, GradientBlock] = {}
    while ruled := set(network.trainable) - plan.fallback.keys():
        try:
            blocks = by_rules(network, state, pair, plan, exact=True)
        except NoRule as e:
            plan = plan.without(e.names - plan.fallback.keys() or ruled, "its rule does not fit")
            continue
        except CheckpointError:
            # Recomputed parts would see the model's own parameters, which are back in their place by then.
            if plan.shield:
                raise
            plan = replace(plan, shield=True)
            continue
        except Unfamiliar as e:
            plan.measured.add(e.calls)
            continue
        wrong = reference.disagree(blocks, ruled, plan.narrowest)
        if not wrong or _only_rounding(network, pair, plan):
            break
        # Rows may belong to other samples than they seem to.
        if not traced:
            traced, plan = True, replace(plan, measured={plan.calls})
            continue
        plan = plan.without(wrong, "its rule disagrees with autograd")
    else:
        blocks = {}
    if plan.fallback:
        plan = _checked_fallback(network, state, pair, plan, reference)
    return _weighed(network, blocks, plan, saved)


def _check_kept(network: Network, unused: tuple[str, ...]) -> None:
    """Refuse parameters that do not count only because a value made of them earlier is used in their place."""
    modules = dict(network.model.named_modules())
    for name in unused:
        path, _, _ = name.rpartition(".")
        # In its own module only: anywhere else there are too many tensors that have nothing to do with it.
        for key, v in modules[path].__dict__.items():
            if isinstance(v, Tensor) and v.is_floating_point() and not v.requires_grad:
                raise ModelError(
                    f"the outputs do not depend on the parameter {name}, but its module keeps a tensor "
                    f"{f'{path}.{key}' if path else key} that may have been computed from it (in eval(), say). Let "
                    "forward() compute it, or leave the parameter out: trainable=…"
                )


def _checked_fallback(
    network: Network, state: Params, pair: Inputs, plan: CapturePlan, reference: "_Reference"
) -> CapturePlan:
    """torch.func where it agrees with autograd, then one sample at a time, then one in the company of another."""

    def wrong(gradients: Mapping[str, Tensor], names: list[str], against: _Reference) -> set[str]:
        """The names whose gradients differ from the reference."""
        return set(against.disagree(_dense(gradients), names, plan.narrowest))

    names = list(plan.fallback)
    try:
        looped = wrong(jacobian_vmap(network, state, pair, names, plan.transient), names, reference)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, ModelError):
        looped = set(names)
    if not looped:
        return plan
    rest = [k for k in names if k in looped]
    # Strictly first: room for cancellation would also hide real differences.
    for against in (reference, reference.cancelling(network, state, pair, plan.shield)):
        for company in (False, True):
            gradients = jacobian_loop(network, state, pair, rest, company=company, shield=plan.shield)
            if not wrong(gradients, rest, against):
                return replace(plan, looped=frozenset(rest), company=company)
    if _both_rounded(network, pair, plan, rest):
        return replace(plan, looped=frozenset(rest), company=True)
    raise ModelError(
        f"two ways to take the gradient of {', '.join(rest)} by autograd disagree: the model is not a deterministic "
        "function of one sample."
    )


def _weighed(network: Network, blocks: Mapping[str, GradientBlock], plan: CapturePlan, saved: int) -> CapturePlan:
    """The plan with the bytes that a sample takes, from the blocks of two in some directions."""
    top = 0.0
    for block in blocks.values():
        # Blocks list activations and cotangents in turn; the cotangents decide the range of 16 bits.
        for cotangents in block.tensors()[1::2]:
            top = max(top, float(cotangents.abs().max()))
    # 16 bits reach up to 2^16: the largest cotangent is put at 2^8, so there is room for 256 times larger ones.
    seed = 2.0 ** round(8 - float(torch.log2(torch.tensor(max(top or 1.0, 1e-30)))))
    entries = sum(p.numel() * p.element_size() for k, p in network.model.named_parameters() if k in plan.fallback)
    sizes = {name: Sizes.of(block) for name, block in blocks.items()}
    # In 16 bits factors take half of what these blocks, which were captured in 32 bits, take.
    plan = replace(plan, sizes=sizes, passes=saved, unruled=entries, half=network.half)
    return replace(plan.for_outputs(plan.c), seed=min(max(seed, 2.0**-14), 2.0**14))


@dataclass(frozen=True)
class _Reference:
    """Jᵀv of two samples by autograd, and how far other ways to compute it may be off.

    `total`: how large all gradients together are. `rounding`: what rounding of the outputs makes of a gradient that is
    zero.
    """

    v: Tensor
    gradients: dict[str, Tensor]  # [2, p]
    unused: tuple[str, ...]  # parameters that the outputs do not depend on
    total: float
    rounding: dict[str, float]

    @staticmethod
    def of(network: Network, state: Params, pair: Inputs, shield: bool, size: float) -> "_Reference":
        """By autograd on both samples together; `size` is the norm of the outputs."""
        v, gradients, unused = autograd_reference(network, state, pair, shield)
        total, rounding = 0.0, {}
        for k, g in gradients.items():
            total += float(g.double().square().sum())
            # An output's rounding, ε·size, divided by how much the parameter moves it: its norm is the only measure.
            length = float(state[k].detach().double().norm())
            rounding[k] = 1e3 * torch.finfo(g.dtype).eps * size / max(length, 1e-30) if length > 0 else 0.0
        return _Reference(v, gradients, unused, total**0.5, rounding)

    def cancelling(self, network: Network, state: Params, pair: Inputs, shield: bool) -> "_Reference":
        """The same with room for the rounding of gradients before the head, which may cancel in it."""
        if network.head is None:
            return self
        plain, inputs = network.without_head(pair)
        _, gradients, _ = autograd_reference(plain, state, inputs, shield)
        room = {k: ROUNDINGS * torch.finfo(g.dtype).eps * float(g.norm()) for k, g in gradients.items()}
        return replace(self, rounding={k: max(v, room[k]) for k, v in self.rounding.items()})

    def gaps(self, blocks: Mapping[str, GradientBlock], names: Collection[str]) -> dict[str, float]:
        """How far the blocks of these parameters are from what autograd says; of factors that do not fit, NaN."""
        return {k: self._gap(blocks.get(k), self.gradients[k]) for k in names}

    def _gap(self, block: GradientBlock | None, want: Tensor) -> float:
        try:
            got = torch.zeros_like(want) if block is None else contracted(block, self.v).to(want)
        except RuntimeError as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            return float("nan")
        return float((got - want).norm())

    def disagree(
        self, blocks: Mapping[str, GradientBlock], names: Collection[str], narrowest: torch.dtype
    ) -> list[str]:
        """Of these parameters, those whose blocks are not what autograd says."""
        wrong = []
        for name, want in self.gradients.items():
            if name in self.unused or name not in names:
                continue
            tolerance = max(FITS.get(want.dtype, 2e-3), FITS.get(narrowest, 2e-3))
            room = tolerance * (float(want.norm()) + 1e-3 * self.total) + self.rounding[name]
            # Not "> room": a difference that is NaN is one.
            if not self._gap(blocks.get(name), want) <= room:
                wrong.append(name)
        return wrong


def _only_rounding(network: Network, pair: Inputs, plan: CapturePlan) -> bool:
    """Whether the plan fits in float64. In fewer bits a ReLU whose input is almost 0 may open for one run and stay shut
    for another, which no tolerance covers. Gradients that cancel in the head differ by roundings of those before it.

    Where all terms of a gradient cancel (the bias of attention's keys), what is left is rounding in float64 too, and it
    is known by its size: a difference that is more than rounding does not shrink with ε.
    """

    def compared(precision: str) -> tuple[_Reference, dict[str, GradientBlock], torch.dtype]:
        """What autograd says in this precision, what the rules make, and the fewest bits in it."""
        other, x = _in(precision, network, pair)
        state = other.state()
        reference = _Reference.of(other, state, x, plan.shield, 0.0).cancelling(other, state, x, plan.shield)
        narrowest = record(other, state, x, plan, differentiable=False, half=False)[1].narrowest
        return reference, by_rules(other, state, x, plan, exact=True), narrowest

    try:
        reference, blocks, narrowest = compared("float64")
        wrong = reference.disagree(blocks, reference.gradients.keys() - plan.fallback.keys(), narrowest)
        if not wrong:
            return True
        coarse, coarse_blocks, _ = compared("float32")
        return _shrinks(coarse.gaps(coarse_blocks, wrong), reference.gaps(blocks, wrong))
    except (RuntimeError, TypeError, NoRule, Unfamiliar):  # a model that insists on its own type
        return False


def _both_rounded(network: Network, pair: Inputs, plan: CapturePlan, names: list[str]) -> bool:
    """Whether two ways to take gradients by autograd differ as roundings do: less in float64, by as much as its ε."""

    def gaps(precision: str) -> dict[str, float]:
        """How far apart they are in this precision."""
        other, x = _in(precision, network, pair)
        state = other.state()
        gradients = jacobian_loop(other, state, x, names, company=True, shield=plan.shield)
        return _Reference.of(other, state, x, plan.shield, 0.0).gaps(_dense(gradients), names)

    try:
        return _shrinks(gaps("float32"), gaps("float64"))
    except (RuntimeError, TypeError):  # a model that insists on its own type
        return False


def _shrinks(coarse: Mapping[str, float], fine: Mapping[str, float]) -> bool:
    """Whether differences found in float32 are so much smaller in float64 that they are rounding."""
    return all(fine[k] <= SHRINKS * coarse[k] for k in fine)


def _in(precision: str, network: Network, pair: Inputs) -> tuple[Network, Inputs]:
    """The network and its samples in another precision."""
    return replace(network, precision=precision), tree.cast(pair, getattr(torch, precision))


def _dense(gradients: Mapping[str, Tensor]) -> dict[str, GradientBlock]:
    return {k: DenseBlock(g) for k, g in gradients.items()}


def in_float64(network: Network) -> bool:
    """Whether the network computes in 64 bits."""
    return next(iter(network.state().values())).dtype == torch.float64
