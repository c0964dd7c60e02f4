"""What went into every use of a parameter while a model runs.

`Recorder` watches all torch functions. It knows of every tensor whether it is a weight (a parameter, or made of
parameters alone), a constant, or data, and treats as data whatever it has not seen made. Functions of weights and
constants make further weights. Where a weight meets data, a function with a rule becomes a `Tap`: its input is kept,
and the place of its output in the autograd graph, so that gradients are taken with respect to layer outputs only. A
function without a rule marks its parameters for the fallback. Nothing is attached to the model, so nothing can be left
behind.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from . import fused
from .apart.recurrent import as_data
from .apart.table import TAKEN_APART
from .layout import Layout
from .readers import LayerCall, read_call, scaling_factor, spread_shape
from .rules import BroadcastRule, LinearRule, NoRule, RepeatedRule, Rule
from .torch_functions import ESCAPES, INDEXING, ORDERING, SHAPE_ONLY, VALUELESS, Function
from .weights import Weight

Key = tuple[Hashable, int]  # of a use: how its weight is made, and how often it was used before
Args = Sequence[object]
Kwargs = Mapping[str, object]


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
    names: list[str] = field(init=False)  # the parameters that it is a use of

    def __post_init__(self) -> None:
        sources = [w.sources for w in (self.weight, self.bias) if w is not None]
        self.names = list(dict.fromkeys(chain(*sources)))


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
    # Tensors met in earlier passes that nobody saw made.
    seen: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    made: dict[Hashable, Tensor] = field(default_factory=dict)  # the weights that were made; kept only while probing

    def __post_init__(self) -> None:
        super().__init__()
        # All by the identity of the tensor. What is in a dictionary is kept alive, so that no other one takes its id.
        # Data are not kept: a freed id that comes back is entered again, or belongs to what nobody saw made, which
        # counts as data too.
        self.weights = {id(v): Weight(k, v, (k,), name=k) for k, v in self.parameters.items()}
        self._constant: dict[int, Tensor] = {}
        self._data: set[int] = set()
        self._replaced: Mapping[int, str] = {}
        self._spoilt: set[int] = set()  # storages of constants that data were written into
        self._counts: dict[Hashable, int] = {}
        self._hooks = _top_hooks()

    def begin(self, constants: Iterable[Tensor], samples: Iterable[Tensor], originals: Mapping[int, str]) -> None:
        """What the pass starts with: tensors that do not depend on the samples (frozen parameters, buffers), and the
        samples. `originals`: by identity, the names of parameters in whose place the model has other tensors."""
        self._constant.update((id(v), v) for v in constants)
        self._data.update(id(v) for v in samples)
        self._replaced = originals

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        # Functions hash by identity, so the fingerprint holds in this process alone; plans do not leave it either.
        self.calls = hash((self.calls, func))
        if func is as_data:
            marked = as_data(*_tensors_in(args))
            self._data.add(id(marked))
            return marked
        tensors = list(_tensors_in((*args, *kwargs.values())))
        for v in tensors:
            if v.requires_grad and id(v) not in self._data and id(v) not in self._constant:
                self._from_outside(v)
        known = [self.weights.get(id(v)) for v in tensors]
        if not any(known):
            out = self._run(func, args, kwargs)
            self._classify(func, kwargs, tensors, out)
            return out
        if all(w is not None or self._is_constant(v) for v, w in zip(tensors, known, strict=True)):
            return self._make(func, args, kwargs, tensors)
        # Data lend a weight their shape alone, or number its parts: what comes out is a weight still.
        if func in SHAPE_ONLY and known[0] is not None:
            return self._make(func, args, kwargs, tensors)
        if func is Tensor.__getitem__ and known[0] is not None and (index := _as_numbers(args[1])) is not None:
            self.routes = True  # data choose which part of a weight is used: experts
            return self._make(func, (args[0], index), {}, tensors[:1])
        return self._meet(func, args, kwargs, tensors)

    def _run(self, func: Function, args: Args, kwargs: Kwargs) -> object:
        if self.keep_outputs and not self.recomputes:
            self.recomputes = _top_hooks() not in (None, self._hooks)
        if not self.shield:
            return func(*args, **kwargs)
        # The innermost hooks win: those of a checkpoint in the model, which would compute again, are overruled.
        with saved_tensors_hooks(lambda v: v, lambda v: v):
            return func(*args, **kwargs)

    def _run_with(self, change: Callable[[Tensor], Tensor], func: Function, args: Args, kwargs: Kwargs) -> object:
        """The function with other tensors in the place of its arguments."""
        return self._run(func, [_mapped(change, v) for v in args], {k: _mapped(change, v) for k, v in kwargs.items()})

    # Which tensors are constant.

    def _from_outside(self, v: Tensor) -> None:
        """A tensor with a graph that nobody saw made: a parameter or what was made of it before, or data."""
        if id(v) in self.weights:
            return
        leaves = _leaves_of(v)
        if lost := [self._replaced[id(p)] for p in leaves if id(p) in self._replaced]:
            raise ModelError(
                f"forward() reaches the parameter {lost[0]}, or a tensor made of it earlier, on another road than its "
                "module's attribute (a list, a closure, a cache), where no other value can be put in its place, as "
                "params=, dtype= and trainable= of frozen parameters need. Let forward() use the attribute."
            )
        made_of = [w for p in leaves if (w := self.weights.get(id(p))) is not None]
        names = [w.name for w in made_of if w.name is not None]
        if leaves and len(names) == len(leaves):
            self._remember(("outside", tuple(names), self._count(("outside", *names))), v, made_of)
        elif leaves and all(id(p) in self._constant or id(p) in self.weights for p in leaves) and not names:
            self._constant[id(v)] = v
        else:
            self._data.add(id(v))

    def _is_constant(self, v: Tensor) -> bool:
        """Whether v does not depend on the samples, as far as is known; in doubt it does."""
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
        # Data may have been written into its memory since, through this tensor or a view of it.
        return not (self._spoilt and _storage(v) in self._spoilt)

    def _classify(self, func: Function, kwargs: Kwargs, tensors: list[Tensor], out: object) -> None:
        """What a function made without weights: constants of constants, else data, which may decide the way."""
        made = list(_tensors_in((out,)))
        data = [v for v in tensors if not self._is_constant(v)]
        if not data or func in VALUELESS:
            self._constant.update((id(v), v) for v in made)
            return
        for v in made:
            self._data.add(id(v))
            self._narrow(v)
        if func in ESCAPES or func in ORDERING:
            self.routes = True
        # The first tensor is what is indexed; those after it are the index, and what is written.
        if func in INDEXING and any(v is w for v in data for w in tensors[1:]):
            self.routes = True
        if _writes_in_place(func) and tensors:
            self._spoilt.add(_storage(tensors[0]))
        if "out" in kwargs:
            self._spoilt |= {_storage(v) for v in _tensors_in((kwargs["out"],))}

    def _narrow(self, v: Tensor) -> None:
        """Note a value with fewer bits than any before."""
        kind = _REAL.get(v.dtype, v.dtype)
        if kind in _BITS and _BITS[kind] < _BITS[self.narrowest]:
            self.narrowest = kind

    # Functions of weights and constants alone.

    def _make(self, func: Function, args: Args, kwargs: Kwargs, tensors: list[Tensor]) -> object:
        """What it makes is a weight again, or a constant if it has no derivative."""
        out = self._run(func, args, kwargs)
        made_of = [w for v in tensors if (w := self.weights.get(id(v))) is not None]
        # How it is made and the how-manieth made so: in every run of the model the same, so that runs can be compared.
        how = hash((getattr(func, "__name__", ""), tuple(w.key for w in made_of)))
        key = (how, self._count(how))
        replaced: dict[int, Tensor] = {}
        if _writes_in_place(func) and torch.is_grad_enabled():  # what was written to is another weight now
            self.weights.pop(id(tensors[0]), None)
            self._forget_views_of(tensors[0])
            out = tensors[0] if out is None else out
        for k, v in enumerate(_tensors_in((out,))):
            if id(v) in self.weights:
                continue
            real = v.is_floating_point() or v.is_complex()
            # Whole numbers, comparisons, detached values: no derivative reaches a parameter through them.
            if not real or (torch.is_grad_enabled() and not v.requires_grad):
                self._constant[id(v)] = v
                continue
            self._narrow(v)
            weight = self._remember((key, k), v, made_of, scaling_factor(func, args, kwargs))
            if self.keep_outputs:
                self.made[weight.key] = v.detach().clone()
            if weight.key in self.copies and torch.is_grad_enabled():
                replaced[id(v)] = self._give(weight, self.copies[weight.key])
        return _mapped(lambda v: replaced.get(id(v), v), out) if replaced else out

    def _remember(self, key: Hashable, v: Tensor, made_of: list[Weight], factor: float | None = None) -> Weight:
        """v, which is made of weights, as a weight from now on."""
        weight = self.weights[id(v)] = Weight.made(key, v, made_of, factor, self.parameters)
        return weight

    def _forget_views_of(self, v: Tensor) -> None:
        """v was changed in place, and with it whatever shares its memory: none of it is a plain view any more."""
        if v.layout != torch.strided:
            return
        place = v.untyped_storage().data_ptr()
        for key, w in self.weights.items():
            if w.name is None and w.slot is not None and w.value.untyped_storage().data_ptr() == place:
                self.weights[key] = replace(w, slot=None, scale=1.0)

    def _give(self, weight: Weight, layout: Layout) -> Tensor:
        """A weight that holds a copy for every sample becomes data: the copies are different things from now on."""
        # The weight proper is one sample's copy; the clone begins a graph of its own, and has a place to take
        # cotangents at.
        first = self._remember((weight.key, "first"), layout.samples_first(weight.value, self.n)[0], [weight])
        copies = weight.value.detach().requires_grad_().clone()
        self._keep(Tap(self._key(weight), RepeatedRule(), first, None, None), copies, copies)
        return copies

    # Functions in which a weight meets data.

    def _meet(self, func: Function, args: Args, kwargs: Kwargs, tensors: list[Tensor]) -> object:
        """By its rule, taken apart into functions that have one, entry by entry, or else unexplained."""
        weights = [w for v in tensors if (w := self.weights.get(id(v))) is not None]
        if any(w.value.is_complex() for w in weights):  # rules are for real numbers
            return self._unexplained(func, args, kwargs, tensors, weights)
        if (steps := self._steps(func, args, kwargs)) is not None:
            with self:  # torch turns a mode off while it handles a function; the steps are to be seen
                return steps()
        written = _writes_in_place(func)
        # Written into a weight, or into data without a graph: there is no output of its own to take a cotangent at.
        if written and (id(tensors[0]) in self.weights or not tensors[0].requires_grad):
            return self._unexplained(func, args, kwargs, tensors, weights)
        call = read_call(func, args, kwargs)
        tap = None if call is None else self._tap(call, weights, written)
        if tap is None:
            shape = spread_shape(func, args, kwargs, self._is_weight) if torch.is_grad_enabled() else None
            if shape is not None:
                return self._spread(func, args, kwargs, weights, shape)
            return self._unexplained(func, args, kwargs, tensors, weights)
        if self.half and func is F.batch_norm:  # torch's derivative takes several passes over memory
            func = fused.batch_norm
        out = self._run_with(self._bare, func, args, kwargs)
        assert isinstance(out, Tensor)
        return self._watch(tap, out)

    def _steps(self, func: Function, args: Args, kwargs: Kwargs) -> Callable[[], object] | None:
        """The function taken apart, if its rule does not fit this call and there is a way."""
        if func not in TAKEN_APART:
            return None
        call = read_call(func, args, kwargs)
        if call is not None and not (call.input is not None and self._is_weight(call.input)):
            return None
        try:
            return TAKEN_APART[func](self._is_weight, *args, **kwargs)
        except (NoRule, TypeError):
            return None

    def _is_weight(self, v: object) -> bool:
        return isinstance(v, Tensor) and id(v) in self.weights

    def _bare(self, v: Tensor) -> Tensor:
        """A weight without its graph, for the layer: gradients end at the layer's output."""
        return v.detach() if v.requires_grad and id(v) in self.weights else v

    def _unexplained(
        self, func: Function, args: Args, kwargs: Kwargs, tensors: list[Tensor], weights: list[Weight]
    ) -> object:
        """A function without a rule: its parameters are for the fallback."""
        out = self._run_with(self._bare, func, args, kwargs)
        made = list(_tensors_in((out,)))
        self._data.update(map(id, made))
        written = _writes_in_place(func)
        # What only looks at a weight (its shape, its type) or gives it back unchanged makes nothing of it.
        if torch.is_grad_enabled() and (written or any(not any(v is w for w in tensors) for v in made)):
            for weight in weights:
                for name in weight.sources:
                    self.unexplained.setdefault(name, getattr(func, "__name__", str(func)))
        if written:
            self.weights.pop(id(tensors[0]), None)
            self._spoilt.add(_storage(tensors[0]))
        if func in ESCAPES or func in ORDERING:
            self.routes = True
        return out

    def _tap(self, call: LayerCall, weights: list[Weight], written: bool) -> Tap | None:
        """The call as a tap, if the rule accounts for every weight in it."""
        weight, bias, x = call.weight, call.bias, call.input
        if isinstance(call.rule, BroadcastRule) and x is not None and id(x) in self.weights:
            weight, x = x, weight  # the weight is the first operand
        of_weight = None if weight is None else self.weights.get(id(weight))
        of_bias = None if bias is None else self.weights.get(id(bias))
        first = of_weight or of_bias
        # A weight in a third place (a mask, a running mean), or as the input too, is beyond the rule.
        covered = (of_weight is not None) + (of_bias is not None)
        if first is None or covered != len({id(w) for w in weights}) or (x is not None and id(x) in self.weights):
            return None
        rule = call.rule
        if isinstance(rule, LinearRule) and of_weight and of_weight.slot and of_weight.transposed:
            # x @ W.t() is what F.linear does with W itself, whose other uses this one can then be joined with.
            rule = LinearRule(transposed=not rule.transposed)
            of_weight = self.weights.get(id(self.parameters[of_weight.sources[0]]))
        if isinstance(rule, BroadcastRule):
            assert weight is not None
            rule = BroadcastRule(tuple(weight.shape), rule.product)
        # The gradient of a bias, and of a summand, does not depend on the input: it is not kept.
        needed = of_weight is not None and not (isinstance(rule, BroadcastRule) and not rule.product)
        x = x if needed else None
        if x is not None and written:  # x *= w overwrites the very factor
            x = x.detach().clone()
        version = 0 if x is None or x.is_inference() else x._version
        return Tap(self._key(first), rule, of_weight, of_bias, x, version)

    def _key(self, weight: Weight) -> Key:
        """Of the next use of a weight."""
        return weight.key, self._count(("use", weight.key))

    def _count(self, what: Hashable) -> int:
        """How often it was counted before."""
        self._counts[what] = self._counts.get(what, 0) + 1
        return self._counts[what] - 1

    def _watch(self, tap: Tap, out: Tensor) -> Tensor:
        """The output of a layer, remembered with its place in the graph."""
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

    def _spread(self, func: Function, args: Args, kwargs: Kwargs, weights: list[Weight], shape: torch.Size) -> object:
        """An elementwise function: every entry of the result gets its own copy of the weight's, and a cotangent."""
        # Cotangents are taken at the copies, before the function: its derivative in them is autograd's work.
        copies = {id(w.value): self._bare(w.value).expand(shape).requires_grad_() for w in weights}
        out = self._run_with(lambda v: copies.get(id(v), v), func, args, kwargs)
        assert isinstance(out, Tensor)
        for w in {id(w.value): w for w in weights}.values():
            rule = BroadcastRule(tuple(w.value.shape), product=False)
            self._keep(Tap(self._key(w), rule, w, None, None), copies[id(w.value)], out)
        return out

    def check_unchanged(self) -> None:
        """Refuse a model that changed a layer's input in place after the layer had used it."""
        for tap in self.taps:
            if tap.input is not None and not tap.input.is_inference() and tap.input._version != tap.version:
                raise ModelError(
                    f"the input of the layer with {tap.names[0]} was changed in place after the layer had used it; "
                    "such a model cannot be trained by autograd either. Replace x += … by x = x + …"
                )


# A complex number has the bits of its parts.
_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
_BITS = {torch.float64: 3, torch.float32: 2, torch.float16: 1, torch.bfloat16: 0}  # in order of their mantissas
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@cache
def _writes_in_place(func: Function) -> bool:
    """Whether the function writes to its first argument."""
    name = getattr(func, "__name__", "")
    if name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"):
        return True
    return name.endswith("_") and not name.startswith("_") and name not in ("requires_grad_", "retain_grad_")


def _as_numbers(index: object) -> object:
    """An index of single numbers that are tensors, as plain numbers; None where it holds other tensors."""
    if isinstance(index, Tensor):
        return int(index) if index.dim() == 0 and index.dtype in _WHOLE else None
    if isinstance(index, tuple):
        plain = tuple(_as_numbers(v) if isinstance(v, Tensor) else v for v in index)
        lost = any(v is None and isinstance(w, Tensor) for v, w in zip(plain, index, strict=True))
        return None if lost else plain
    return None


def _top_hooks() -> object:
    """The hooks on saved tensors that are in force; None where there are none, or torch does not tell."""
    tell = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if tell is None else tell(True)


def _leaves_of(v: Tensor) -> list[Tensor]:
    """The leaves of the graph that v was made by; v itself if it is one."""
    if v.grad_fn is None:
        return [v]
    leaves: dict[int, Tensor] = {}
    # Without recursion: graphs of long loops are deeper than Python's stack.
    seen, left = {v.grad_fn}, [v.grad_fn]
    while left:
        node = left.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                left.append(after)
    return list(leaves.values())


def _storage(v: Tensor) -> int:
    """Which memory v lies in; views of one tensor share it."""
    try:
        return v.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a sparse tensor has none
        return id(v)


def _tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """The tensors among some values and in lists of them, in order."""
    for v in values:
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, (list, tuple)):
            yield from _tensors_in(v)


def _mapped(f: Callable[[Tensor], Tensor], v: object) -> object:
    """f of every tensor in v."""
    if isinstance(v, Tensor):
        return f(v)
    if not isinstance(v, (list, tuple)):
        return v
    make: Callable[..., object] = type(v)
    if hasattr(v, "_fields"):  # a named tuple
        return make(*(_mapped(f, w) for w in v))
    return make(_mapped(f, w) for w in v) if type(v) in (list, tuple, torch.Size) else v
