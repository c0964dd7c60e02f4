"""What went into every use of a parameter while a model runs.

`Recorder` watches all torch functions. It knows of every tensor whether it is a weight (a parameter, or made of
parameters alone), a constant, or data, and treats as data whatever it has not seen made. Functions of weights and
constants make further weights. Where a weight meets data, a function with a rule becomes a `Tap`: its input is kept,
and the place of its output in the autograd graph, so that gradients are taken with respect to layer outputs only. A
function without a rule marks its parameters for the fallback. Nothing is attached to the model, so nothing can be left
behind.
"""

import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from . import fused
from .apart import TAKEN_APART
from .apart.recurrent import as_data
from .layout import Layout
from .readers import Call, factor, read, spread
from .rules import Broadcast, Linear, NoRule, Repeated, Rule
from .torch_functions import escapes, in_place, routes, shape_only, valueless
from .weights import Weight, Weights

Key = tuple[Hashable, int]  # of a use: how its weight is made, and how often it was used before


@dataclass
class Tap:
    """One use of a weight by a function with a rule."""

    key: Key
    rule: Rule
    weight: Weight | None
    bias: Weight | None
    input: Tensor | None
    version: int = 0
    shape: torch.Size = field(default_factory=torch.Size)
    edge: GradientEdge | None = None
    output: Tensor | None = None  # kept only while probing

    @property
    def names(self) -> list[str]:
        """The parameters that it is a use of."""
        return list(dict.fromkeys(name for w in (self.weight, self.bias) if w is not None for name in w.sources))


@dataclass(eq=False)
class Recorder(TorchFunctionMode):
    """Records the taps of one forward pass over n samples."""

    parameters: Mapping[str, Tensor]  # those that count, leaves of the graph; the model gets these very tensors
    n: int
    copies: Mapping[Hashable, Layout] = field(default_factory=dict)  # weights that hold a copy for every sample
    keep_outputs: bool = False
    half: bool = False  # cotangents are kept in 16 bits, and are of first order only
    shield: bool = False  # save tensors for the backward pass even where the model would compute them again
    taps: list[Tap] = field(default_factory=list)
    unexplained: dict[str, str] = field(default_factory=dict)  # parameter → the function without a rule
    routes: bool = False  # data decided which way samples went
    calls: int = 0  # a fingerprint of all functions called
    recomputes: bool = False  # the model has hooks of its own on what is saved for the backward pass: checkpoints
    unknown: bool = False  # a tensor was met that was not seen before
    narrowest: torch.dtype = torch.float64  # the fewest bits that the model computed in
    seen: dict[int, Any] = field(default_factory=dict)  # tensors met in earlier passes that nobody saw made
    made: dict[Hashable, Tensor] = field(default_factory=dict)  # the weights that were made; kept only while probing

    def __post_init__(self) -> None:
        super().__init__()
        self.weights = Weights(self.parameters)
        self._constant: dict[int, Tensor] = {}
        self._data: set[int] = set()
        self._replaced: Mapping[int, str] = {}
        self._spoilt: set[int] = set()  # storages of constants that data were written into
        self._counts: dict[Hashable, int] = {}
        self._hooks = _top_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls = hash((self.calls, func))
        if func is as_data:
            out = as_data(*args)
            self._data.add(id(out))
            return out
        tensors = list(tensors_in(args, kwargs))
        for v in tensors:
            if v.requires_grad and id(v) not in self._data and id(v) not in self._constant:
                self._from_outside(v)
        known = [self.weights.get(v) for v in tensors]
        if not any(known):
            out = self._run(func, args, kwargs)
            self._classify(func, args, kwargs, tensors, out)
            return out
        if all(w is not None or self._is_constant(v) for v, w in zip(tensors, known, strict=True)):
            return self._make(func, args, kwargs, tensors)
        if func in shape_only() and known[0] is not None:
            return self._make(func, args, kwargs, tensors)
        if func is Tensor.__getitem__ and known[0] is not None and (index := _as_numbers(args[1])) is not None:
            self.routes = True  # data choose which part of a weight is used: experts
            return self._make(func, (args[0], index), {}, tensors[:1])
        return self._meet(func, args, kwargs, tensors)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.keep_outputs and not self.recomputes:
            self.recomputes = _top_hooks() not in (None, self._hooks)
        if not self.shield:
            return func(*args, **kwargs)
        with saved_tensors_hooks(lambda v: v, lambda v: v):
            return func(*args, **kwargs)

    # Which tensors are constant.

    def know(self, constants: Iterable[Tensor]) -> None:
        """These tensors do not depend on the samples: frozen parameters, buffers."""
        self._constant.update((id(v), v) for v in constants)

    def follow(self, data: Iterable[Tensor]) -> None:
        """These tensors are the samples."""
        self._data.update(id(v) for v in data)

    def replaced(self, originals: Mapping[int, str]) -> None:
        """By identity, the names of parameters in whose place the model has other tensors."""
        self._replaced = originals

    def _from_outside(self, v: Tensor) -> None:
        """A tensor with a graph that nobody saw made: a parameter or what was made of it before, or data."""
        if self.weights.get(v) is not None:
            return
        leaves = leaves_of(v)
        if lost := [self._replaced[id(p)] for p in leaves if id(p) in self._replaced]:
            raise ModelError(
                f"forward() reaches the parameter {lost[0]}, or a tensor made of it earlier, on another road than its "
                "module's attribute (a list, a closure, a cache), where no other value can be put in its place, as "
                "params=, dtype= and train= of frozen parameters need. Let forward() use the attribute."
            )
        names = [w.name for p in leaves if (w := self.weights.get(p)) is not None and w.name is not None]
        if leaves and len(names) == len(leaves):
            made_of = [w for p in leaves if (w := self.weights.get(p)) is not None]
            self.weights.add(("outside", tuple(names), self._count(("outside", *names))), v, made_of, None)
        elif leaves and all(id(p) in self._constant or self.weights.get(p) is not None for p in leaves) and not names:
            self._constant[id(v)] = v
        else:
            self._data.add(id(v))

    def _is_constant(self, v: Tensor) -> bool:
        key = id(v)
        if key not in self._constant:
            if key in self._data or v.requires_grad:
                return False
            # Not made in this pass. If it was there in an earlier one, it is older than these samples.
            if key not in self.seen or self.seen[key]() is not v:
                self.seen[key] = weakref.ref(v)
                self._data.add(key)
                self.unknown = True
                return False
            self._constant[key] = v
        return not (self._spoilt and _storage(v) in self._spoilt)

    def _classify(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Any) -> None:
        made = list(tensors_in((out,), {}))
        data = [v for v in tensors if not self._is_constant(v)]
        if not data or func in valueless():
            self._constant.update((id(v), v) for v in made)
            return
        for v in made:
            self._data.add(id(v))
            self._narrow(v)
        if func in escapes() or routes(func, any(v is w for v in data for w in tensors[1:])):
            self.routes = True
        if in_place(func) and tensors:
            self._spoilt.add(_storage(tensors[0]))
        if "out" in kwargs:
            self._spoilt |= {_storage(v) for v in tensors_in((kwargs["out"],), {})}

    def _narrow(self, v: Tensor) -> None:
        kind = _REAL.get(v.dtype, v.dtype)
        if kind in _BITS and _BITS[kind] < _BITS[self.narrowest]:
            self.narrowest = kind

    # Functions of weights and constants alone.

    def _make(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """What it makes is a weight again, or a constant if it has no derivative."""
        out = self._run(func, args, kwargs)
        made_of = [w for w in map(self.weights.get, tensors) if w is not None]
        how = hash((getattr(func, "__name__", ""), tuple(w.key for w in made_of)))
        key = (how, self._count(how))
        replaced: dict[int, Tensor] = {}
        if in_place(func) and torch.is_grad_enabled():  # what was written to is another weight now
            self.weights.drop(tensors[0])
            self.weights.written(tensors[0])
            out = tensors[0] if out is None else out
        for k, v in enumerate(tensors_in((out,), {})):
            if self.weights.get(v) is not None:
                continue
            real = v.is_floating_point() or v.is_complex()
            if not real or (torch.is_grad_enabled() and not v.requires_grad):
                self._constant[id(v)] = v
                continue
            self._narrow(v)
            weight = self.weights.add((key, k), v, made_of, factor(func, args, kwargs))
            if self.keep_outputs:
                self.made[weight.key] = v.detach().clone()
            if weight.key in self.copies and torch.is_grad_enabled():
                replaced[id(v)] = self._give(weight, self.copies[weight.key])
        return mapped(lambda v: replaced.get(id(v), v), out) if replaced else out

    def _give(self, weight: Weight, layout: Layout) -> Tensor:
        """A weight that holds a copy for every sample becomes data: the copies are different things from now on."""
        first = self.weights.add((weight.key, "first"), layout.samples_first(weight.value, self.n)[0], [weight], None)
        given = weight.value.detach().requires_grad_().clone()
        tap = Tap(self._key(weight), Repeated(), first, None, None)
        self._keep(tap, given, given)
        return given

    # Functions in which a weight meets data.

    def _meet(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        weights = [w for w in map(self.weights.get, tensors) if w is not None]
        if any(w.value.is_complex() for w in weights):  # rules are for real numbers
            return self._unexplained(func, args, kwargs, tensors, weights)
        if (steps := self._steps(func, args, kwargs)) is not None:
            with self:
                return steps()
        written = in_place(func)
        if written and (self.weights.get(tensors[0]) is not None or not tensors[0].requires_grad):
            return self._unexplained(func, args, kwargs, tensors, weights)
        call = read(func, args, kwargs)
        tap = None if call is None else self._tap(call, weights, written)
        if tap is None:
            shape = spread(func, args, kwargs, self._is_weight) if torch.is_grad_enabled() else None
            if shape is not None:
                return self._spread(func, args, kwargs, weights, shape)
            return self._unexplained(func, args, kwargs, tensors, weights)
        if self.half and func is F.batch_norm:
            func = fused.batch_norm
        out = self._run(func, mapped(self._bare, args), {k: mapped(self._bare, v) for k, v in kwargs.items()})
        return self._watch(tap, out)

    def _steps(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The function taken apart, if its rule does not fit this call and there is a way."""
        if func not in TAKEN_APART:
            return None
        call = read(func, args, kwargs)
        if call is not None and not (call.input is not None and self._is_weight(call.input)):
            return None
        try:
            return TAKEN_APART[func](self._is_weight, *args, **kwargs)
        except (NoRule, TypeError):
            return None

    def _is_weight(self, v: Any) -> bool:
        return isinstance(v, Tensor) and self.weights.get(v) is not None

    def _bare(self, v: Any) -> Any:
        weight = self.weights.get(v) if isinstance(v, Tensor) else None
        return v if weight is None else weight.plain

    def _unexplained(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], weights: list[Weight]) -> Any:
        out = self._run(func, mapped(self._bare, args), {k: mapped(self._bare, v) for k, v in kwargs.items()})
        made = list(tensors_in((out,), {}))
        self._data.update(map(id, made))
        written = in_place(func)
        if torch.is_grad_enabled() and (written or any(not any(v is w for w in tensors) for v in made)):
            for weight in weights:
                for name in weight.sources:
                    self.unexplained.setdefault(name, getattr(func, "__name__", str(func)))
        if written:
            self.weights.drop(tensors[0])
            self._spoilt.add(_storage(tensors[0]))
        if func in escapes() or routes(func, False):
            self.routes = True
        return out

    def _tap(self, call: Call, weights: list[Weight], written: bool) -> Tap | None:
        """The call as a tap, if the rule accounts for every weight in it."""
        weight, bias, x = call.weight, call.bias, call.input
        if isinstance(call.rule, Broadcast) and x is not None and self.weights.get(x) is not None:
            weight, x = x, weight  # the weight is the first operand
        of_weight, of_bias = (None if v is None else self.weights.get(v) for v in (weight, bias))
        mine = [w for w in (of_weight, of_bias) if w is not None]
        if len(mine) != len({id(w) for w in weights}) or (x is not None and self.weights.get(x) is not None):
            return None
        rule = call.rule
        if isinstance(rule, Linear) and of_weight is not None and _transposed(of_weight):
            rule = Linear(transposed=not rule.transposed)
            name = of_weight.sources[0]
            of_weight = self.weights.get(self.parameters[name])
        if isinstance(rule, Broadcast):
            assert weight is not None
            rule = Broadcast(tuple(weight.shape), rule.product)
        needed = of_weight is not None and not (isinstance(rule, Broadcast) and not rule.product)
        x = x if needed else None
        if x is not None and written:
            x = x.detach().clone()
        version = 0 if x is None or x.is_inference() else x._version
        return Tap(self._key(mine[0]), rule, of_weight, of_bias, x, version)

    def _key(self, weight: Weight) -> Key:
        return weight.key, self._count(("use", weight.key))

    def _count(self, what: Hashable) -> int:
        """How often it was counted before."""
        self._counts[what] = self._counts.get(what, 0) + 1
        return self._counts[what] - 1

    def _watch(self, tap: Tap, out: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not out.requires_grad:
            # The graph begins here; cloned, since the model may work in place on it.
            out = out.detach().requires_grad_().clone()
        self._keep(tap, out, out)
        return out

    def _keep(self, tap: Tap, at: Tensor, output: Tensor) -> None:
        """Remember a tap whose cotangent is what comes back to `at`; the samples lie there as in `output`."""
        self._data.update((id(at), id(output)))
        tap.shape = at.shape
        if torch.is_grad_enabled():
            tap.edge = get_gradient_edge(at)
        if self.keep_outputs:
            tap.output = output.detach().clone()
        self.taps.append(tap)

    def _spread(self, func: Any, args: Any, kwargs: Any, weights: list[Weight], shape: torch.Size) -> Any:
        """An elementwise function: every entry of the result gets its own copy of the weight's, and a cotangent."""
        own = {id(w.value): w.plain.expand(shape).requires_grad_() for w in weights}

        def spread_out(v: Any) -> Any:
            weight = self.weights.get(v) if isinstance(v, Tensor) else None
            return v if weight is None else own[id(weight.value)]

        out = self._run(func, mapped(spread_out, args), {k: mapped(spread_out, v) for k, v in kwargs.items()})
        for w in {id(w.value): w for w in weights}.values():
            rule = Broadcast(tuple(w.value.shape), product=False)
            self._keep(Tap(self._key(w), rule, w, None, None), own[id(w.value)], out)
        return out

    def check_unchanged(self) -> None:
        """Refuse a model that changed a layer's input in place after the layer had used it."""
        for tap in self.taps:
            if tap.input is not None and not tap.input.is_inference() and tap.input._version != tap.version:
                raise ModelError(
                    f"the input of the layer with {tap.names[0]} was changed in place after the layer had used it; "
                    "such a model cannot be trained by autograd either. Replace x += … by x = x + …"
                )


_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
_BITS = {torch.float64: 3, torch.float32: 2, torch.float16: 1, torch.bfloat16: 0}


def _transposed(weight: Weight) -> bool:
    """Whether it is W.t() of a whole matrix W, unscaled."""
    s = weight.slot
    if s is None or weight.scale != 1 or len(s.shape) != 2 or s.count != s.size:
        return False
    return s.stride == (1, s.shape[0]) and s.shape[0] > 1 and s.shape[1] > 1


def _as_numbers(index: Any) -> Any:
    """An index of single numbers that are tensors, as plain numbers; None where it holds other tensors."""
    if isinstance(index, Tensor):
        return int(index) if index.dim() == 0 and index.dtype in _WHOLE else None
    if isinstance(index, tuple):
        each = [_as_numbers(v) if isinstance(v, Tensor) else v for v in index]
        return (
            None if any(v is None and isinstance(w, Tensor) for v, w in zip(each, index, strict=True)) else tuple(each)
        )
    return None


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _top_hooks() -> Any:
    """The hooks on saved tensors that are in force; None where there are none, or torch does not tell."""
    tell = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if tell is None else tell(True)


def leaves_of(v: Tensor) -> list[Tensor]:
    """The leaves of the graph that v was made by; v itself if it is one."""
    if v.grad_fn is None:
        return [v]
    found: dict[int, Tensor] = {}
    seen, left = {v.grad_fn}, [v.grad_fn]
    while left:
        node = left.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found[id(leaf)] = leaf
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                left.append(after)
    return list(found.values())


def _storage(v: Tensor) -> int:
    try:
        return v.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a sparse tensor has none
        return id(v)


def tensors_in(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterable[Tensor]:
    for v in (*args, *kwargs.values()):
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, (list, tuple)):
            yield from tensors_in(v, {})


def mapped(f: Any, v: Any) -> Any:
    """f of every tensor in v."""
    if isinstance(v, Tensor):
        return f(v)
    if isinstance(v, tuple) and hasattr(v, "_fields"):
        return type(v)(*(mapped(f, w) for w in v))
    if type(v) in (list, tuple, torch.Size):
        return type(v)(mapped(f, w) for w in v)
    return v
