"""An nn.Module read by torch.fx: its calls become layers, what it does to tensors becomes operations on positions.

What depends on the input alone is computed as it stands; from the first weights on, values are random fields.
"""

import hashlib
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn

from ..errors import InputError, UnsupportedModule
from ..kernel import architecture, digest
from .fields import Builder
from .layers import Layer
from .modules import convert
from .tensors import FUNCTIONS, METHODS, RANDOM, Call, Parameter
from .weights import Weights


class Tracer(fx.Tracer):
    """Goes into the user's own modules; torch's are read as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.record_stack_traces = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        own = m.__module__.startswith(("torch.nn", "torch.ao.nn"))
        return own and not isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


@dataclass(frozen=True)
class Traced(Layer):
    """A module, by its graph."""

    source: nn.Module
    graph: fx.Graph = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph", traced(self.source))

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source}  # the graph holds functions that pickle does not take; it is traced again

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "source", state["source"])
        object.__setattr__(self, "graph", traced(self.source))

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        return Reading(self.source, build, weights, name).run(self.graph, value)

    def module(self, width: int) -> nn.Module:
        return self.source

    def spec(self) -> Any:
        own = dict(self.source.named_parameters())
        buffers = {k: v for k, v in self.source.state_dict().items() if k not in own}
        return {
            "model": architecture(self.source),
            "forward": hashlib.sha256(str(self.graph).encode()).hexdigest()[:16],
            "buffers": digest(buffers),
            "training": any(m.training for m in self.source.modules()),
        }

    def numbers(self, weights: Weights) -> dict[str, Any]:
        """What each layer's weights were taken for."""
        fresh = replace(weights, record={})
        for name, m in self.source.named_modules():
            weight, bias = getattr(m, "weight", None), getattr(m, "bias", None)
            if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd)) and isinstance(weight, Tensor):
                fan_in = weight[0].numel()
                fresh.layer(name, fan_in, bias=bias is not None, tensors=(weight, bias))
            elif isinstance(m, nn.Embedding):
                fresh.layer(name, 1, bias=False, tensors=(weight, None))
        return fresh.record


def traced(module: nn.Module) -> fx.Graph:
    """The module's graph; what cannot be traced gets the line where tracing stopped."""
    if module.__module__.startswith("torch.nn") and not isinstance(module, (nn.Sequential, nn.ModuleList)):
        module = nn.Sequential(module)  # a single layer of torch's
    try:
        graph = Tracer().trace(module)
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

    def __init__(self, module: nn.Module, build: Builder, weights: Weights, name: str) -> None:
        self.module, self.build, self.weights, self.prefix = module, build, weights, name
        wrapped = module.__module__.startswith("torch.nn") and not isinstance(module, (nn.Sequential, nn.ModuleList))
        self.root = nn.Sequential(module) if wrapped else module
        self.single = wrapped
        self.modules = dict(self.root.named_modules())
        self.called: dict[int, str] = {}

    def run(self, graph: fx.Graph, value: Any) -> Any:
        env: dict[fx.Node, Any] = {}
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
                    env[node] = self.step(node, args, kwargs)
        finally:
            self.build.where, self.build.name = was
        raise AssertionError("a graph without output")

    def name(self, target: str) -> str:
        target = target.removeprefix("0") if self.single else target
        return ".".join(part for part in (self.prefix, target) if part)

    def step(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        build = self.build
        if node.op == "get_attr":
            return self.attribute(str(node.target))
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            name = self.name(str(node.target))
            build.name, build.where = name, f"{name or 'the module'} ({type(module).__name__})"
            if not any(isinstance(v, RANDOM) for v in _leaves((args, kwargs))) and not _weighted(module):
                return module(*args, **kwargs)
            self.once(module, name)
            return convert(module, build, self.weights, name, args, kwargs)
        label = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        build.where = f"{label} at {_stack(node)}" if _stack(node) else str(label)
        build.name = ".".join(part for part in (self.prefix, node.name) if part)
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

    def attribute(self, target: str) -> Any:
        value: Any = self.root
        for part in target.split("."):
            value = getattr(value, part)
        return Parameter(value, self.name(target)) if isinstance(value, nn.Parameter) else value

    def once(self, module: nn.Module, name: str) -> None:
        """Shared weights correlate what they give in two places."""
        for p in module.parameters():
            if id(p) in self.called:
                raise self.build.unsupported(
                    f"shares its weights with {self.called[id(p)]}; such layers have no rule but nn.RNN.",
                    "Give each call its own module.",
                )
        self.called |= {id(p): name for p in module.parameters()}


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
