"""An nn.Module read by torch.fx: its calls become layers, what it does to tensors becomes operations on positions.

What depends on the input alone is computed as it stands; from the first weights on, values are random fields.
"""

import copy
import hashlib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn

from ..errors import InputError, UnsupportedModule
from ..kernel import architecture, digest
from .calls import RANDOM, Call, Parameter
from .fields import Builder
from .functional import FUNCTIONS, METHODS
from .layers import Layer
from .modules import as_known, convert
from .twin import Twin
from .weights import Weights, dotted


class Tracer(fx.Tracer):
    """Goes into the user's own modules; torch's are read as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.record_stack_traces = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, Twin):
            return True
        own = m.__module__.startswith(("torch.nn", "torch.ao.nn"))
        return own and not isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


@dataclass(frozen=True)
class Traced(Layer):
    """A module, by its graph."""

    source: nn.Module
    root: nn.Module = field(init=False, repr=False, compare=False)  # what was traced: fx keeps constants on it
    graph: fx.Graph = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A copy without depth: the modules are the user's, but fx's constants do not land on the user's model.
        root = nn.Sequential(self.source) if _single(self.source) else copy.copy(self.source)
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "graph", traced(root, self.source))

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source}  # the graph holds functions that pickle does not take; it is traced again

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "source", state["source"])
        self.__post_init__()

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        return Reading(self, build, weights, name).run(value)

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


def traced(root: nn.Module, module: nn.Module) -> fx.Graph:
    """The module's graph; what cannot be traced gets the line where tracing stopped."""
    try:
        graph = Tracer().trace(root)
    except Exception as e:
        raise UnsupportedModule(
            f"{type(module).__name__} cannot be traced by torch.fx, at {_line(e)}: {e}. Write that line without "
            "control flow on values or shapes of tensors, or give the network as layers of tangency.infinite."
        ) from e
    return graph


def _line(error: BaseException) -> str:
    """The last line outside of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/torch/" not in f.filename and "/tangency/infinite/" not in f.filename]
    if not own:
        return "an unknown line"
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})"


def _stack(node: fx.Node) -> str:
    """Where in the user's code a node comes from."""
    lines = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s+([^\n]+)', node.stack_trace or "")
    own = [f for f in lines if "/torch/" not in f[0]]
    return f"{own[-1][0]}:{own[-1][1]} ({own[-1][2].strip()})" if own else ""


class Reading:
    """One run over a graph: values are tensors, fields, numbers, tuples."""

    def __init__(self, traced: Traced, build: Builder, weights: Weights, name: str) -> None:
        self.traced, self.build, self.weights, self.prefix = traced, build, weights, name
        self.single = _single(traced.source)
        self.modules = dict(traced.root.named_modules())
        self.called: dict[int, str] = {}
        self.fixed: set[fx.Node] = set()  # known values that no input decides: they have no batch

    def run(self, value: Any) -> Any:
        env: dict[fx.Node, Any] = {}
        graph = self.traced.graph
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
                    env[node] = self.step(node, args, kwargs)
        finally:
            self.build.where, self.build.name = was
        raise AssertionError("a graph without output")

    def name(self, target: str) -> str:
        target = target.removeprefix("0") if self.single else target
        return dotted(self.prefix, target)

    def step(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        build = self.build
        if node.op == "get_attr":
            return self.attribute(node)
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            name = self.name(str(node.target))
            build.name, build.where = name, f"{name or 'the module'} ({type(module).__name__})"
            if not any(isinstance(v, RANDOM) for v in _leaves((args, kwargs))) and not _weighted(module):
                return as_known(module, *args, **kwargs)
            self.once(module.parameters(), name)
            if isinstance(module, nn.Embedding) and node.all_input_nodes[0] in self.fixed:
                index = args[0] if args else kwargs["input"]  # a table of positions: the same for every sample
                index = index if index.dim() > 1 and index.shape[0] == 1 else index.unsqueeze(0)
                args, kwargs = (index.expand(build.size, *index.shape[1:]),), {}
            return convert(module, build, self.weights, name, args, kwargs)
        label = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        build.where = f"{label} at {_stack(node)}" if _stack(node) else str(label)
        build.name = dotted(self.prefix, node.name)
        call = Call(build, self.weights, args, kwargs, str(label))
        if not any(isinstance(v, (*RANDOM, Parameter)) for v in _leaves((args, kwargs))):
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
        return rule(call)

    def attribute(self, node: fx.Node) -> Any:
        value, name = attribute(self.traced.root, str(node.target)), self.name(str(node.target))
        if not isinstance(value, nn.Parameter):
            return value
        uses = [u for u in node.users if u.target not in (getattr, "size", "dim") or u.args[1:2] in (("T",), ("mT",))]
        at = _stack(uses[-1]) if uses else ""
        label = getattr(uses[-1].target, "__name__", str(uses[-1].target)) if uses else name
        self.build.where = f"{label} at {at}" if at else f"{name} (a parameter)"
        if len(uses) > 1:
            raise self._shared(f"{len(uses)} uses of {name}")
        self.once([value], name)
        return Parameter(value, name)

    def once(self, parameters: Iterable[nn.Parameter], name: str) -> None:
        """Shared weights correlate what they give in two places."""
        every = list(parameters)
        for p in every:
            if id(p) in self.called:
                raise self._shared(self.called[id(p)])
        self.called |= {id(p): name for p in every}

    def _shared(self, where: str) -> UnsupportedModule:
        return self.build.unsupported(
            f"shares its weights with {where}; such layers have no rule but nn.RNN.", "Give each use its own weights."
        )


def _inputs(graph: fx.Graph, value: Any) -> dict[Any, Any]:
    """The inputs by the names of forward()'s arguments."""
    names = [node.target for node in graph.nodes if node.op == "placeholder"]
    needed = [node.target for node in graph.nodes if node.op == "placeholder" and not node.args]
    if isinstance(value, dict):
        given = dict(value)
    else:
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        given = dict(zip(names, values, strict=False))
        if len(values) > len(names):
            raise InputError(f"{len(values)} inputs were given; the model takes {names}.")
    if any(name not in given for name in needed):
        raise InputError(f"the model takes {names}; given were {sorted(given)}.")
    defaults = {node.target: node.args[0] for node in graph.nodes if node.op == "placeholder" and node.args}
    return {**defaults, **given}


def _first(value: Any, build: Builder) -> Any:
    """The network's output: a tuple's or dict's only tensor."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        found = [v for v in value if isinstance(v, RANDOM)]
        if len(found) != 1:
            raise build.unsupported(f"returns {len(found)} random values.", "Return one tensor.")
        return found[0]
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from _leaves(v)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))
    else:
        yield value


def _weighted(module: nn.Module) -> bool:
    """Whether its output is random although its input is known."""
    return any(True for _ in module.parameters()) or (
        module.training and isinstance(module, (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm))
    )
