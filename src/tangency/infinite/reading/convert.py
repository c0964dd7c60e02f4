"""An nn.Module read by torch.fx: its calls become layers, what it does to tensors becomes operations on positions.

What depends on the input alone is computed as it stands; from the first weights on, values are random fields.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..._base import tree
from ...errors import InputError, TangencyError, UnsupportedModule
from ...kernels.kernel import architecture, digest
from ..layers.basic import Layer
from ..layers.weights import Weights, dotted
from ..moments.fields import Builder
from .calls import RANDOM, Call, Options, Parameter
from .faithful import Settled, check_root
from .functional import FUNCTIONS, METHODS
from .graphs import Tracer, faithful, in_place, leaves, same_outputs, spoiled, stack, traced
from .modules import as_known, convert


@dataclass(frozen=True)
class Traced(Layer):
    """A module, by its graph."""

    source: nn.Module
    root: nn.Module = field(init=False, repr=False, compare=False)  # what was traced: fx keeps constants on it
    graph: fx.Graph = field(init=False, repr=False, compare=False)
    tracer: Tracer = field(init=False, repr=False, compare=False)
    modes: tuple[bool, ...] = field(init=False, repr=False, compare=False)  # training or not, as it was traced
    spoiled: dict[fx.Node, fx.Node] = field(init=False, repr=False, compare=False)
    in_place: bool = field(init=False, repr=False, compare=False)
    verified: set[str] = field(init=False, repr=False, compare=False)  # forms of inputs for which the graph is right

    def __post_init__(self) -> None:
        check_root(self.source)
        # A copy without depth: the modules are the user's, but fx's constants do not land on the user's model.
        root = nn.Sequential(self.source) if _single(self.source) else copy.copy(self.source)
        tracer = Tracer(_single(self.source))
        made = {"root": root, "tracer": tracer, "modes": _modes(self.source), "verified": set()}
        made["graph"] = graph = traced(root, self.source, tracer)
        modules = dict(root.named_modules())
        made |= {"spoiled": spoiled(graph, modules), "in_place": in_place(graph, modules)}
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source}  # the graph holds functions that pickle does not take; it is traced again

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "source", state["source"])
        self.__post_init__()

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        self._again()
        found = Reading(self, build, _frozen(weights, self.source, name), name).run(value)
        self._verify(value)
        return found

    def _again(self) -> None:
        """What may have changed since the trace: hooks, weights, the modes of training or evaluation."""
        check_root(self.source)
        for name, m in self.tracer.met.items():
            faithful(self.tracer, name, m)
        if _modes(self.source) != self.modes:
            self.__post_init__()

    def _verify(self, value: Any) -> None:
        """Once for each form of inputs: the graph must compute what the module does."""
        if any(not isinstance(v, Tensor) for v in leaves(value)):
            return  # hidden values of layers before it
        form = str([(label, v.shape[1:], v.dtype) for label, v in tree.leaves(value)])
        if form in self.verified:
            return
        if not same_outputs(self.source, self.root, self.graph, tree.take(value, slice(0, 2))):
            raise UnsupportedModule(
                f"{type(self.source).__name__}: its forward() gives other values than what torch.fx traced of it, so "
                "it does something that tracing passes over: it asks for types (isinstance(x, Tensor) is False there), "
                "catches errors, keeps a state, or draws Python's or NumPy's random numbers. Write it without."
            )
        self.verified.add(form)

    def module(self, width: int) -> nn.Module:
        return self.source

    def spec(self) -> Any:
        read = {str(n.target): attribute(self.root, str(n.target)) for n in self.graph.nodes if n.op == "get_attr"}
        slopes = {k: m.weight for k, m in self.source.named_modules() if isinstance(m, nn.PReLU)}
        known = {
            **dict(self.source.named_buffers()),
            **{k: v for k, v in read.items() if isinstance(v, Tensor)},
            **slopes,
        }
        modes = "".join("t" if m.training else "e" for m in self.source.modules())
        return {
            "model": architecture(self.source),
            "forward": hashlib.sha256(str(self.graph).encode()).hexdigest()[:16],
            "known": digest(known),
            "training": hashlib.sha256(modes.encode()).hexdigest()[:8] if "t" in modes and "e" in modes else modes[:1],
        }

    def numbers(self, weights: Weights) -> dict[str, Any]:
        """What each layer's weights were taken for."""
        fresh = replace(weights, record={})
        for name, m in self.source.named_modules():
            if any(isinstance(p, nn.UninitializedParameter) for p in m.parameters(recurse=False)):
                raise InputError(f"{name} is lazy and has no weights yet. Call the model once first.")
            _noted(fresh, name, m)
        return fresh.record


def _single(module: nn.Module) -> bool:
    """Whether it is one layer of torch's."""
    return module.__module__.startswith("torch.nn") and not isinstance(module, (nn.Sequential, nn.ModuleList))


def _noted(weights: Weights, name: str, m: nn.Module) -> None:
    """Let the weights of one module be decided, for the record."""
    weight, bias = getattr(m, "weight", None), getattr(m, "bias", None)
    if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd)) and isinstance(weight, Tensor):
        fan_in = weight.shape[0] * weight[0, 0].numel() if getattr(m, "transposed", False) else weight[0].numel()
        weights.layer(name, fan_in, bias=bias is not None, tensors=(weight, bias))
    elif isinstance(m, nn.Embedding):
        weights.layer(name, 1, bias=False, tensors=(weight, None))
    elif isinstance(m, (nn.RNNBase, nn.MultiheadAttention)):
        for own, p in m.named_parameters(recurse=False):
            if own.startswith(("weight", "in_proj_weight")):
                other = getattr(m, own.replace("weight", "bias"), None)
                names = (own, own.replace("weight", "bias"))
                weights.layer(name, p.shape[1], bias=other is not None, tensors=(p, other), names=names)
                weights.record[dotted(name, own)] = weights.record.pop(name or names[0])


def attribute(root: nn.Module, target: str) -> Any:
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _modes(module: nn.Module) -> tuple[bool, ...]:
    return tuple(m.training for m in module.modules())


def _frozen(weights: Weights, source: nn.Module, name: str) -> Weights:
    """A module among layers keeps what it has frozen, unless `train=` says which parameters count."""
    if not name or weights.chosen:
        return weights
    frozen = {dotted(name, n) for n, p in source.named_parameters() if not p.requires_grad}
    trained = weights.trained
    return replace(weights, trained=lambda n: n not in frozen and trained(n)) if frozen else weights


class Reading:
    """One run over a graph: values are tensors, fields, numbers, tuples."""

    def __init__(self, traced: Traced, build: Builder, weights: Weights, name: str) -> None:
        self.traced, self.build, self.weights, self.prefix = traced, build, weights, name
        self.single = _single(traced.source)
        self.modules = dict(traced.root.named_modules())
        self.fixed: set[fx.Node] = set()  # known values that no input decides: they have no batch

    def run(self, value: Any) -> Any:
        env: dict[fx.Node, Any] = {}
        graph = self.traced.graph
        if self.traced.in_place:  # the user's tensors stay as they are
            value = tree.transform(torch.clone, value)
        inputs = _inputs(graph, value)
        was = self.build.where, self.build.name
        try:
            for node in graph.nodes:
                if node.op == "placeholder":
                    env[node] = inputs[node.target]
                elif node.op == "output":
                    return _first(fx.map_arg(node.args[0], lambda n: env[n]), self.build)
                else:
                    args = fx.map_arg(node.args, lambda n: env[n])
                    kwargs = fx.map_arg(node.kwargs, lambda n: env[n])
                    if not any(
                        isinstance(env[n], (Tensor, *RANDOM)) and n not in self.fixed for n in node.all_input_nodes
                    ):
                        self.fixed.add(node)
                    env[node] = self.tried(node, args, kwargs)
        finally:
            self.build.where, self.build.name = was
        raise AssertionError("a graph without output")

    def name(self, target: str) -> str:
        target = target.removeprefix("0") if self.single else target
        return dotted(self.prefix, target)

    def tried(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """One step; what it fails with says where, and that it is the module that could not be read."""
        try:
            return self.step(node, args, kwargs)
        except (TangencyError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as e:
            raise UnsupportedModule(
                f"{self.build.where}: could not be read for these inputs, {type(e).__name__}: {e}. Call the model with "
                "them; if that works, use a torch.nn layer there or layers of tangency.infinite."
            ) from e

    def unread(self, node: fx.Node, args: Any, kwargs: Any, weighted: bool = False) -> None:
        """What a graph does not show: gradients that are cut, and random values changed under another name."""
        random = weighted or any(isinstance(v, (*RANDOM, Parameter)) for v in leaves((args, kwargs)))
        if random and node.meta.get("cut"):
            raise self.build.unsupported(
                "runs without gradients (torch.no_grad, or an autograd.Function), which the limit would not.",
                "Freeze its parameters instead, by requires_grad_(False) or train=.",
            )
        if random and node in self.traced.spoiled:
            at = stack(self.traced.spoiled[node]) or self.traced.spoiled[node].name
            raise self.build.unsupported(
                f"changes a value in place that is read later under its old name, at {at}.",
                "Use the form that returns a new value (inplace=False, x = x + y).",
            )

    def step(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        build = self.build
        if node.op == "get_attr":
            return self.attribute(node)
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            name = self.name(str(node.target))
            build.name, build.where = name, f"{name or 'the module'} ({type(module).__name__})"
            self.unread(node, args, kwargs, _weighted(module))
            if not any(isinstance(v, RANDOM) for v in leaves((args, kwargs))) and not _weighted(module):
                with Settled(build.where):
                    return as_known(module, *args, **kwargs)
            self.once(module.parameters(), name)
            if isinstance(module, nn.Embedding) and node.all_input_nodes[0] in self.fixed:
                index = args[0] if args else kwargs["input"]  # a table of positions: the same for every sample
                index = index if index.dim() > 1 and index.shape[0] == 1 else index.unsqueeze(0)
                args, kwargs = (index.expand(build.size, *index.shape[1:]),), {}
            return convert(module, build, self.weights, name, args, kwargs)
        label = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        build.where = f"{label} at {stack(node)}" if stack(node) else str(label)
        build.name = dotted(self.prefix, node.name)
        self.unread(node, args, kwargs)
        options = Options(kwargs)
        call = Call(build, self.weights, args, options, str(label))
        if not any(isinstance(v, (*RANDOM, Parameter)) for v in leaves((args, kwargs))):
            with Settled(build.where):
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                return node.target(*args, **kwargs)  # type: ignore[operator]
        rule: Callable[[Call], Any] | None
        rule = METHODS.get(str(node.target)) if node.op == "call_method" else FUNCTIONS.get(node.target)
        if rule is None:
            raise build.unsupported(
                "has no rule for random values.",
                "Use a torch.nn layer for it, or build the network from layers of tangency.infinite.",
            )
        found = rule(call)
        if missed := options.missed():
            raise build.unsupported(f"is given {missed}, which is not read for random values.", "Leave it out.")
        return found

    def attribute(self, node: fx.Node) -> Any:
        value, name = attribute(self.traced.root, str(node.target)), self.name(str(node.target))
        if not isinstance(value, nn.Parameter):
            if isinstance(value, Tensor) and value.requires_grad:
                self.build.where = f"{name} (a tensor)"
                raise self.build.unsupported(
                    "requires a gradient but is no parameter: it is made of others, or was not registered.",
                    "Make it an nn.Parameter of the module and compute with it in forward(), or detach() it.",
                )
            return value
        uses = [u for u in node.users if u.target not in (getattr, "size", "dim") or u.args[1:2] in (("T",), ("mT",))]
        at = stack(uses[-1]) if uses else ""
        label = getattr(uses[-1].target, "__name__", str(uses[-1].target)) if uses else name
        self.build.where = f"{label} at {at}" if at else f"{name} (a parameter)"
        if len(uses) > 1:
            raise self._shared(f"{len(uses)} uses of {name}")
        self.once([value], name)
        return Parameter(value, name)

    def once(self, parameters: Iterable[nn.Parameter], name: str) -> None:
        """Shared weights correlate what they give in two places."""
        called = self.build.called
        every = [(_place(p), p) for p in parameters]
        for place, _ in every:
            if place in called:
                raise self._shared(called[place][0])
        called |= {place: (name, p) for place, p in every}  # the parameter too: its place stays its own

    def _shared(self, where: str) -> UnsupportedModule:
        return self.build.unsupported(
            f"shares its weights with {where}; such layers have no rule but nn.RNN.", "Give each use its own weights."
        )


def _place(p: Tensor) -> Any:
    """Where a parameter's numbers lie: two in one place are one."""
    if isinstance(p, nn.UninitializedParameter) or not p.numel() or p.is_meta:
        return id(p)
    try:
        return p.device, p.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return id(p)


def _inputs(graph: fx.Graph, value: Any) -> dict[Any, Any]:
    """The inputs by the names of forward()'s arguments."""
    every = [node for node in graph.nodes if node.op == "placeholder"]
    names = [str(node.target) for node in every if not str(node.target).startswith("*")]
    needed = [str(node.target) for node in every if not node.args and not str(node.target).startswith("*")]
    rest: dict[str, Any] = {str(n.target): {} if str(n.target).startswith("**") else () for n in every}
    more = [name for name in rest if name.startswith("*") and not name.startswith("**")]
    if isinstance(value, dict):
        given = dict(value)
        if unknown := sorted(str(n) for n in given if n not in names):
            raise InputError(f"inputs {unknown} were given by name; the model takes {names}.")
    else:
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        given = dict(zip(names, values, strict=False))
        if len(values) > len(names) and not more:
            raise InputError(f"{len(values)} inputs were given; the model takes {names}.")
        given |= {name: tuple(values[len(names) :]) for name in more}
    if any(name not in given for name in needed):
        raise InputError(f"the model takes {names}; given were {sorted(given)}.")
    defaults = {node.target: node.args[0] for node in every if node.args}
    return {**{k: v for k, v in rest.items() if k.startswith("*")}, **defaults, **given}


def _first(value: Any, build: Builder) -> Any:
    """The network's output: a tuple's or dict's only tensor."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        found = [v for v in value if isinstance(v, RANDOM)]
        if len(found) != 1:
            raise build.unsupported(f"returns {len(found)} random values.", "Return one tensor.")
        return found[0]
    if not isinstance(value, (Tensor, *RANDOM)):
        raise build.unsupported(f"the model returns a {type(value).__name__}.", "Return one tensor.")
    return value


def _weighted(module: nn.Module) -> bool:
    """Whether its output is random although its input is known."""
    return any(True for _ in module.parameters()) or (
        module.training and isinstance(module, (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm))
    )
