"""A model at a point in parameter space, as a plain function from inputs to outputs [n, c].

It runs the user's model with other tensors in place of its own, and leaves it exactly as it was.
`torch.func.functional_call` swaps by name: a module with two names is restored by the first and then spoilt by the
second. Here every module is visited once, tensors are known by identity, and all that a forward pass leaves behind in
a module (caches, counters, weights made by hooks, a replaced submodule) is taken out again, after errors too.
"""

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import is_
from threading import RLock
from typing import Any, TypeAlias
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.types import Float, Inputs, Params, PickedOutputs, Trainable
from ..errors import InputError, ModelError
from .directions import Directions
from .heads import Head, Readout, head_arity
from .modes import numerical_modes
from .recorder import Recorder

TURN = RLock()  # a model, or a part that two models share, is lent to one thread at a time
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, set})
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
# How parameters and inputs are kept in each precision. 'tf32', 'float16' and 'float8' round inside of products only.
_STORED = {"float64": torch.float64} | dict.fromkeys(("float32", "tf32", "float16", "float8"), torch.float32)

Cache: TypeAlias = dict[Any, Any]  # a dict of a model, which may have any keys
Container: TypeAlias = Cache | list[Any] | set[Any]


@dataclass(frozen=True, eq=False)
class Network:
    """f(params, x) → [n, c]: the model, where its parameters come from, which count, and what is made of its outputs.

    With `params=None` the model's own parameters are read at every call (they may go on training); a state dict that
    was given is copied once and never changes. `caches` are dicts in which the model keeps what it computed in earlier
    calls; `examine` finds them, and they are empty while the model runs here.
    """

    model: nn.Module
    params: Params | None
    trainable: tuple[str, ...]
    readout: Readout
    precision: str | None
    caches: list[Cache] = field(default_factory=list, repr=False)
    seen: dict[int, ref[Tensor]] = field(default_factory=dict, repr=False)  # tensors that the model keeps elsewhere
    tidy: list[bool] = field(default_factory=list, repr=False)  # whether forward() leaves nothing behind, once examined
    directions: tuple[Directions, ...] = ()  # what is made of the outputs last of all, one after the other

    def __getstate__(self) -> dict[str, object]:
        """What was found out about the model belongs to this process."""
        return self.__dict__ | {"caches": [], "seen": {}, "tidy": []}

    @staticmethod
    def of(
        model: nn.Module,
        *,
        params: Params | None = None,
        trainable: Trainable = None,
        outputs: PickedOutputs = None,
        head: Head = None,
        dtype: object = None,
    ) -> "Network":
        """The network of a user's model and options, all of them checked."""
        if not isinstance(model, nn.Module):
            raise InputError(f"model is a {type(model).__name__}; needed: a torch.nn.Module.")
        model, prefix = unwrapped(model)
        for name, p in model.named_parameters():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise InputError(f"parameter {name} is not initialised yet (a lazy module). Run the model once first.")
            if p.is_meta:
                raise InputError(f"parameter {name} is on the meta device and has no values. Load the weights first.")
        if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
            raise InputError(
                "the model holds scripted modules (torch.jit), whose parameters torch cannot replace. Pass "
                "the original nn.Module."
            )
        if params is not None:
            checks.state_dict(params)
            params = {k.removeprefix(prefix): v for k, v in params.items()}
            checks.params(params, model)
            params = {k: v.detach().clone() for k, v in params.items()}
        trainable = trainable.removeprefix(prefix) if isinstance(trainable, str) else trainable
        precision = None if dtype is None else str(dtype).removeprefix("torch.")
        precision = "float8" if dtype is torch.float8_e4m3fn else precision
        if dtype is not None and (not isinstance(dtype, (str, torch.dtype)) or precision not in _STORED):
            raise InputError(
                f"dtype={dtype!r}; needed: float64, float32, 'tf32', float16 (16-bit factors, 32-bit sums) or 'float8' "
                "(the same with large products of 8 bits, e4m3), or None."
            )
        readout = Readout(outputs, head, 0 if head is None else head_arity(head) - 1)
        return Network(model, params, checks.trained(model, trainable), readout, precision)

    @property
    def outputs(self) -> PickedOutputs:
        """What picks the outputs out of what the model returns."""
        return self.readout.outputs

    @property
    def head(self) -> Head:
        """What is made of the outputs before gradients are taken."""
        return self.readout.head

    @property
    def computes(self) -> torch.dtype | None:
        """The type that is computed in; None where parameters of several types each have their own."""
        return _STORED.get(self.precision or "") or tree.dtype_of(self.model)

    @property
    def half(self) -> bool:
        """Whether factors are kept in 16 bits; 'float8' only multiplies in fewer."""
        return self.precision in ("float16", "float8")

    @property
    def eight(self) -> bool:
        """Whether large products are of 8 bits."""
        return self.precision == "float8"

    @property
    def channels_last(self) -> bool:
        """The memory order in which 16-bit convolutions are fastest on a GPU."""
        return self.half and next(self.model.parameters()).device.type == "cuda"

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        """x checked and cast: to the type that is computed in, if it is one."""
        check_evaluation_mode(self.model)
        dtype = _STORED.get(self.precision or "")
        used = [(self.params or {}).get(k, p) for k, p in self.model.named_parameters()]
        dtypes = {dtype} if dtype else {p.dtype for p in used if p.is_floating_point()}
        x = tree.given(x, name)
        for kind in dtypes:
            if kind not in (torch.float32, torch.float64):
                raise InputError(
                    f"the parameters are {kind}. Say in what to compute: dtype='float32', or dtype='float16' for "
                    "16-bit factors with 32-bit sums."
                )
        # Of several types each may be meant: a model that mixes them gets its inputs as they are.
        if dtype is not None:
            x = tree.cast(x, dtype, name)
        elif len(dtypes) == 1:
            x = self.narrowed(x, next(iter(dtypes)), name)
        tree.check_place(x, next(self.model.parameters()).device, dtypes)
        return x

    def narrowed(self, x: Inputs, dtype: torch.dtype, name: str) -> Inputs:
        """x in this type, as `tree.narrowed`: refused where this network needs the digits that are lost."""
        return tree.narrowed(x, dtype, lambda part: self.observed(self.state(), part).out, name)

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers as this function takes them: detached and cast."""
        given = self.params or {}
        dtype = _STORED.get(self.precision or "")

        def cast(v: Tensor) -> Tensor:
            """A value in the type that is computed in."""
            v = v.detach()
            return v.to(dtype) if dtype is not None and v.is_floating_point() else v

        # Not while another thread has its own tensors in the model.
        with TURN:
            parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        if gone := [k for k in self.trainable if k not in parameters]:
            raise InputError(
                f"the model no longer has the parameter {gone[0]} (tied or replaced since the kernel was made). Make a "
                "new kernel."
            )
        # An own object per parameter: its identity is how the recorder knows it.
        state = {k: cast(given.get(k, p)).detach() for k, p in parameters.items()}
        # What forward() writes to must not be the user's memory.
        renewed = written_by_forward(self.model)
        state = {k: v.clone() if k in renewed else v for k, v in state.items()}
        if self.channels_last:
            state = {k: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in state.items()}
        state = {k: stand_in(parameters[k], v, False) for k, v in state.items()}
        state |= {k: cast(given.get(k, b)) for k, b in buffers.items()}
        return state

    def leaves(self, state: Params, names: Iterable[str]) -> dict[str, Tensor]:
        """What gradients are taken with respect to: the model's own parameters where they can stay in their place.

        Then a parameter counts on whatever road forward() reaches it. Elsewhere (other values, another type, frozen,
        gradient hooks of its own) it is a stand-in.
        """
        parameters, leaves = dict(self.model.named_parameters()), {}
        free = self.params is None and self.tidy == [True] and not self.channels_last
        for k in names:
            p = parameters[k]
            stays = free and p.requires_grad and not p._backward_hooks and not p.is_inference()
            same = state[k].dtype == p.dtype and state[k].data_ptr() == p.data_ptr()
            leaves[k] = p if stays and same else stand_in(p, state[k], True)
        return leaves

    def __call__(self, state: Params, x: Inputs, watch: Recorder | None = None) -> Float[Tensor, "n c"]:
        """The outputs. forward() gets copies of the buffers, so that what it does to them is forgotten."""
        args, kwargs = self.arguments(x)
        buffers = {k for k, _ in self.model.named_buffers()}
        values = {k: v.clone() if k in buffers else v for k, v in state.items()}
        if watch is not None:
            # Everything that the recorder must know before the first call of torch: what is made of parameters (under
            # which name), what never changes, and what depends on the samples.
            constants = [v for _, _, _, v in plain_tensors(self.model) if not v.requires_grad]
            replaced = {id(p): k for k, p in self.model.named_parameters() if values[k] is not p}
            data = [v for _, v in tree.leaves((args, kwargs))]
            watch.begin([*values.values(), *constants], data, replaced)
        with watch or nullcontext():
            with borrowed(self.model, values, self.caches):
                returned = self.model(*args, **kwargs)
            out = self.readout(returned, x)
        return self.directed(out)  # unseen by the recorder: the model's calls are the same in every direction

    def directed(self, out: Tensor) -> Tensor:
        """The directions of the outputs [n, c] that count."""
        for directions in self.directions:
            out = directions(out)
        return out

    def through(self, directions: Directions) -> "Network":
        """The network with these directions of its outputs for outputs."""
        return replace(self, directions=(*self.directions, directions))

    def whole(self) -> "Network":
        """The network with all outputs."""
        return replace(self, directions=())

    def observed(self, state: Params, x: Inputs) -> "Observation":
        """One run with copies of everything that forward() might change, which are there to be compared afterwards.

        Parameters are stand-ins that require gradients as the model's own do, and share the memory of `state`.
        """
        device = next(self.model.parameters()).device
        before = _random_state(device)
        inputs = tree.transform(lambda v: v.clone(), x)
        args, kwargs = self.arguments(inputs)
        buffers = {k: state[k].clone() for k, _ in self.model.named_buffers()}
        given = {k: stand_in(p, state[k], p.requires_grad) for k, p in self.model.named_parameters()}
        types = {k: v.dtype for k, v in given.items()}
        copies = []
        # Borrowed twice: the outer one puts plain attributes back, the inner one parameters, buffers and all the rest.
        with torch.enable_grad(), self.modes(exact=True), borrowed(self.model, {}):
            for name, table, key, v in list(plain_tensors(self.model)):
                if v.layout == torch.strided and not v.requires_grad:
                    table[key] = copy = v.clone()
                    copies.append((name, v, copy))
            with borrowed(self.model, {**given, **buffers}, self.caches):
                inside = Snapshot.of(self.model)
                known = {k for k, _ in self.model.named_parameters()}
                returned = self.model(*args, **kwargs)
                # Before the model is put in order again: afterwards there is nothing to be seen.
                new = [k for k, _ in self.model.named_parameters() if k not in known]
                unchanged = inside.unchanged() and all(v.dtype == types[k] for k, v in given.items())
            if new:
                raise InputError(
                    f"forward() makes the parameter {new[0]} when it is first called. Run the model once first."
                )
            out = self.readout(returned, inputs).detach()
        return Observation(out, inputs, buffers, copies, unchanged, (before, _random_state(device)))

    @contextmanager
    def at(self, state: Params) -> Iterator[Callable[[Inputs], Tensor]]:
        """The function of x alone, for many calls: a model that leaves nothing behind is borrowed once for all."""
        if self.tidy != [True]:
            yield lambda x: self(state, x)
            return
        with borrowed(self.model, state):

            def call(x: Inputs) -> Tensor:
                """f(x) at these values."""
                args, kwargs = self.arguments(x)
                return self.directed(self.readout(self.model(*args, **kwargs), x))

            yield call

    def arguments(self, x: Inputs) -> tuple[tuple[object, ...], dict[str, object]]:
        """What the model is called with."""
        inputs = self.readout.split(x)[0] if self.readout.extra > 0 else x
        if self.channels_last:
            inputs = tree.transform(lambda v: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v, inputs)
        return tree.arguments(inputs)

    def without_head(self, x: Inputs) -> tuple["Network", Inputs]:
        """The network whose outputs are those that the head gets, and its inputs."""
        return replace(self, readout=Readout(self.outputs, None), directions=()), self.readout.split(x)[0]

    @contextmanager
    def modes(self, *, differentiable: bool = False, exact: bool = False) -> Iterator[None]:
        """The numerical modes that this precision asks for, for as long as the context lasts; none if `exact`.

        The caller's autocast is off (one inside the model is not), and so is the compiling of compiled parts.
        """
        device = next(self.model.parameters()).device
        # cuDNN's recurrent layers have no backward pass in evaluation mode; torch's own do.
        without_cudnn = any(isinstance(m, nn.RNNBase) for m in self.model.modules())
        tf32 = (self.half or self.precision == "tf32") and not exact
        with numerical_modes(device, tf32=tf32, differentiable=differentiable, without_cudnn=without_cudnn):
            yield


@dataclass(frozen=True)
class Observation:
    """What one run of a model did, as far as copies show it."""

    out: Tensor  # [n, c]
    inputs: Inputs  # the copies that forward() got, as it left them
    buffers: dict[str, Tensor]  # likewise
    attributes: list[tuple[str, Tensor, Tensor]]  # tensors that are plain attributes: name, the model's own, the copy
    unchanged: bool  # whether the modules hold the very same objects as before
    generators: tuple[list[object], list[object]]  # states of the random number generators before and after


def _random_state(device: torch.device) -> list[object]:
    """The states of all generators that a model may draw from."""
    states: list[object] = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def unwrapped(model: nn.Module) -> tuple[nn.Module, str]:
    """The model inside torch.compile, DataParallel and DistributedDataParallel, and the prefix that they give names."""
    prefix = ""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model, prefix = inner, prefix + "_orig_mod."
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model, prefix = model.module, prefix + "module."
        else:
            return model, prefix


def check_evaluation_mode(model: nn.Module) -> None:
    """Refuse modules whose training behaviour makes the kernel random or mixes the samples of a batch."""
    drawing, mixing = list[tuple[str, nn.Module]](), list[tuple[str, nn.Module]]()
    fix = "Build them with track_running_stats=True"
    for name, m in model.named_modules():
        if isinstance(m, (nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)):
            chance = m.dropout if isinstance(m, (nn.RNNBase, nn.MultiheadAttention)) else getattr(m, "p", 1)
            if m.training and chance > 0:
                drawing.append((name, m))
        # Instance norms are of the same class, but their statistics are those of one sample.
        norm = isinstance(m, nn.modules.batchnorm._NormBase) and not isinstance(
            m, nn.modules.instancenorm._InstanceNorm
        )
        if norm and (m.training or not m.track_running_stats or m.running_mean is None):
            mixing.append((name, m))
            fix = "Call model.eval() first" if m.training else fix
    if drawing:
        raise ModelError(
            f"{checks.layers(drawing)} {'is' if len(drawing) == 1 else 'are'} in training mode, so the model is random "
            "and has no kernel. Call model.eval() first."
        )
    if mixing:
        raise ModelError(
            f"{checks.layers(mixing)} use{'s' * (len(mixing) == 1)} the statistics of the batch, so one sample's "
            f"output depends on the others. {fix}."
        )


# Borrowing a model.


@dataclass
class Snapshot:
    """What the modules of a model hold: their attributes, and the contents of dicts, lists and sets among them."""

    full: list[tuple[Container, Container]] = field(default_factory=list)  # (container, its contents)
    empty: list[Container] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module) -> "Snapshot":
        """The model as it is now; containers inside of containers four levels deep."""
        snapshot, seen = Snapshot(), set[int]()
        for module in model.modules():
            snapshot._keep(module.__dict__, seen, depth=4)
        return snapshot

    def _keep(self, value: Container, seen: set[int], depth: int) -> None:
        # Most containers of a module are empty (hooks): a copy of each would be most of the work.
        if not value:
            self.empty.append(value)
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        self.full.append((value, value.copy()))
        if depth > 1:
            for inner in value.values() if isinstance(value, dict) else value:
                if type(inner) in _CONTAINERS:
                    self._keep(inner, seen, depth - 1)

    def unchanged(self) -> bool:
        """Whether the model still holds the very same objects."""
        return not any(self.empty) and all(_alike(now, before) for now, before in self.full)

    def restore(self) -> None:
        """Put everything back. Done again from the start if Ctrl-C comes in between: it may be repeated."""
        interrupted: KeyboardInterrupt | None = None
        while True:
            try:
                for value in self.empty:
                    if value:
                        value.clear()
                for now, before in self.full:
                    _put_back(now, before)
                break
            except KeyboardInterrupt as e:
                interrupted = e
        if interrupted is not None:
            raise interrupted


def _alike(now: Container, before: Container) -> bool:
    if isinstance(now, dict) and isinstance(before, dict):
        return len(now) == len(before) and all(map(is_, now.values(), before.values())) and now.keys() == before.keys()
    if isinstance(now, list) and isinstance(before, list):
        return len(now) == len(before) and all(map(is_, now, before))
    return bool(now == before)


def _put_back(now: Container, before: Container) -> None:
    if _alike(now, before):
        return
    if isinstance(now, list):
        now[:] = before
    else:
        now.clear()
        now.update(before)


@contextmanager
def borrowed(model: nn.Module, values: Params, empty: Iterable[Cache] = ()) -> Iterator[None]:
    """Within it, the model's parameters and buffers are `values`, by name; after it, all is as before.

    `empty` are dicts of the model (caches) that are empty for as long.
    """
    with TURN:
        replaced = {id(v): values[k] for k, v in (*model.named_parameters(), *model.named_buffers()) if k in values}
        before = Snapshot.of(model)
        types = [(v, v.dtype, v.detach()) for v in values.values()]
        try:
            for module in model.modules():
                for table in (module._parameters, module._buffers):
                    for name, v in table.items():
                        if v is not None and id(v) in replaced:
                            table[name] = replaced[id(v)]  # type: ignore[assignment]
            for cache in empty:
                cache.clear()
            yield
        finally:
            before.restore()
            for v, dtype, data in types:
                # forward() changed the type of a parameter: `layer.to(…)`
                if v.dtype != dtype:
                    v.data = data


def stand_in(p: Tensor, value: Tensor, needs_grad: bool) -> Tensor:
    """`value` in the place of a parameter: of its class, with its attributes."""
    value = value.detach()
    # Code that asks isinstance(p, nn.Parameter), or for attributes of a subclass, must go the same way.
    if not isinstance(p, nn.Parameter):
        return value.requires_grad_(needs_grad)
    try:
        made = torch.Tensor._make_subclass(type(p), value, needs_grad)
        made.__dict__.update(p.__dict__)
    except (TypeError, RuntimeError):  # a class with a constructor of its own
        return value.requires_grad_(needs_grad)
    return made


def attributes(model: nn.Module) -> Iterator[tuple[str, dict[str, object], str, object]]:
    """(name, table, key, value) of everything that a module holds as a plain attribute."""
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key not in _OF_EVERY_MODULE:
                yield f"{name}.{key}" if name else key, module.__dict__, key, value


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, object], str, Tensor]]:
    """Tensors that are attributes without being parameters or buffers."""
    return ((name, table, key, v) for name, table, key, v in attributes(model) if isinstance(v, Tensor))


def written_by_forward(model: nn.Module) -> set[str]:
    """Weights that forward() itself writes to: embeddings with max_norm."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    written = {id(m.weight) for m in model.modules() if isinstance(m, embeddings) and m.max_norm is not None}
    return {k for k, p in model.named_parameters() if id(p) in written}
