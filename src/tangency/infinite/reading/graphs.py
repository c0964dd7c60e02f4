"""A module's graph by torch.fx, with what fx itself passes over: no_grad, changes in place, random numbers."""

import copy
import inspect
import linecache
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..._base import tree
from ...engine.network import TURN
from ...errors import TangencyError, UnsupportedModule
from ..layers.twin import Twin
from .calls import Args, Kwargs, TorchFunction
from .custom import functions_stop
from .faithful import check_leaf, check_module

# What returns its input, or a view of it: a change in place of one is a change of both.
_VIEWS = {
    "view", "reshape", "flatten", "transpose", "swapaxes", "swapdims", "permute", "movedim", "t", "squeeze",
    "unsqueeze", "unflatten", "expand", "expand_as", "chunk", "split", "narrow", "select", "contiguous", "to",
    "type_as", "float", "double", "detach", "getitem", "getattr", "view_as", "Identity", "Flatten", "Unflatten",
}  # fmt: skip
# Python's operators that change their left side, or an entry of it.
_IN_PLACE: set[TorchFunction] = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow, operator.ifloordiv, operator.imod,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.setitem,
}  # fmt: skip


class Untraceable(UnsupportedModule):
    """torch.fx stops at this module; running it may still show what it does (`recorded.py`)."""


class StandIn(fx.Proxy):
    """fx's stand-in for a tensor; x += y stays a change in place (fx would make it x + y)."""


def _recorded(target: TorchFunction) -> Callable[[StandIn, object], fx.Proxy]:
    """The method of a StandIn that notes x += y as it stands."""

    def change(self: StandIn, other: object) -> fx.Proxy:
        """x += y, as a node of the graph."""
        after: fx.Proxy = self.tracer.create_proxy("call_function", target, (self, other), {})
        return after

    return change


for _target in _IN_PLACE - {operator.setitem}:
    setattr(StandIn, f"__{_target.__name__}__", _recorded(_target))


class Tracer(fx.Tracer):
    """Goes into the user's own modules; torch's are read as they are. `met` are all that were called, by name."""

    def __init__(self, single: bool) -> None:
        super().__init__()
        self.single = single
        self.thread = threading.get_ident()
        self.met: dict[str, nn.Module] = {}
        self.asked: Exception | None = None  # a question about values that forward() asked and caught the error of

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """As fx has it: the stand-in for a node's value."""
        return StandIn(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """As fx has it: refused; that it was asked is kept, for forward() may catch the error and go on."""
        self.asked = fx.proxy.TraceError("control flow on a tensor's value")
        return super().to_bool(obj)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """As fx has it: whether a module is read as it is, not gone into."""
        if isinstance(m, Twin):
            return True
        # Containers are gone into: they only call what they hold.
        of_torch = type(m).__module__.startswith(("torch.nn", "torch.ao.nn"))
        return of_torch and not isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict))

    # While fx traces, every nn.Module of the process calls these two: models of other threads go their own way.
    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: Kwargs) -> object:
        """As fx has it: a module's attribute, parameters as stand-ins."""
        if threading.get_ident() != self.thread:
            return attr_val
        value: object = super().getattr(attr, attr_val, parameter_proxy_cache)
        return value

    def call_module(self, m: nn.Module, forward: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """As fx has it: a module's call; what the module is, is checked first."""
        if threading.get_ident() != self.thread:
            outputs: object = forward(*args, **kwargs)
            return outputs
        path = self.path_of_module(m)
        name = path.removeprefix("0") if self.single else path
        self.check(name, m)
        self.met[name] = m
        value: object = super().call_module(m, forward, args, kwargs)
        return value

    def check(self, name: str, m: nn.Module) -> None:
        """Refuse a module that does other things than its graph will show."""
        (check_leaf if self.is_leaf_module(m, name) else check_module)(m, name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """As fx has it: a new node; `cut` notes whether gradients are off there, `line` the user's line of code."""
        node = super().create_node(*args, **kwargs)
        # fx records no torch.no_grad(): what is made within looks like the rest.
        node.meta["cut"] = not torch.is_grad_enabled()
        # fx can record whole stacks too, which takes longer than all the rest of tracing.
        node.meta["line"] = users_line()
        return node


class Settled(TorchDispatchMode):
    """Within it, drawing random numbers is refused: the value of one draw would be taken for the network's."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        # torch tags every operation that draws from a generator.
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedModule(
                f"{self.where}: draws random numbers ({func}), and one draw is not the network. Draw them beforehand "
                "and keep them as a buffer, use nn.Dropout, or model.eval()."
            )
        value: object = func(*args, **(kwargs or {}))
        return value


@dataclass(frozen=True)
class ModuleGraph:
    """What tracing found of a module."""

    root: nn.Module  # what was traced: fx keeps constants on it
    nodes: fx.Graph
    tracer: Tracer
    single: bool  # whether the module is one layer of torch's, in a Sequential of its own
    modes: tuple[bool, ...]  # training or not, as it was traced
    spoiled: dict[fx.Node, fx.Node]  # nodes that change a value which a later one reads under its old name: that one
    in_place: bool  # whether any node changes a value in place


def trace_module(module: nn.Module) -> ModuleGraph:
    """The module's graph, and what is to be known of it before it is read."""
    single = module.__module__.startswith("torch.nn") and not isinstance(module, (nn.Sequential, nn.ModuleList))
    # A copy without depth: the modules are the user's, but fx's constants do not land on the user's model.
    root = nn.Sequential(module) if single else copy.copy(module)
    tracer = Tracer(single)
    nodes = _traced(root, module, tracer)
    for node in nodes.nodes:
        # torch.fx.wrap keeps a library's function whole (torchvision's stochastic depth); run, it shows what it does.
        of = getattr(node.target, "__module__", None) if node.op == "call_function" else None
        if isinstance(of, str) and of.partition(".")[0] not in ("torch", "_operator", "builtins", "math"):
            raise Untraceable(f"{type(module).__name__} calls {of}.{node.name}, which torch.fx does not go into.")
    return examined(root, nodes, tracer, single, training_modes(module))


def examined(root: nn.Module, nodes: fx.Graph, tracer: Tracer, single: bool, modes: tuple[bool, ...]) -> ModuleGraph:
    """A graph with what is changed in it in place, and which changes a later node would not see."""
    modules = dict(root.named_modules())
    changes = {node: value for node in nodes.nodes if (value := changed_node(node, modules)) is not None}
    return ModuleGraph(root, nodes, tracer, single, modes, _spoiled(nodes, changes, modules), in_place=bool(changes))


def training_modes(module: nn.Module) -> tuple[bool, ...]:
    """Whether each module within it is training."""
    return tuple(m.training for m in module.modules())


def _traced(root: nn.Module, module: nn.Module, tracer: Tracer) -> fx.Graph:
    """The graph by fx; what cannot be traced gets the line where tracing stopped."""
    try:
        # One trace at a time: two that overlap would each put back what the other left in nn.Module.
        with TURN, torch.enable_grad(), functions_stop(), Settled(f"forward() of {type(module).__name__}"):
            graph = tracer.trace(root)
            if tracer.asked is not None:  # and went on
                raise tracer.asked
    except TangencyError:
        raise
    except Exception as e:
        raise (UnsupportedModule if _own_fault(module, e) else Untraceable)(
            f"{type(module).__name__} cannot be traced by torch.fx, at {line_of_error(e)}: {type(e).__name__}: {e}. "
            + _advice(module, e)
        ) from e
    return graph


def _own_fault(module: nn.Module, error: Exception) -> bool:
    """Whether running the module would stop too, or what it runs could not be named."""
    lost = ("not installed as a submodule", "not a member of this module")
    return (
        type(module).forward is nn.Module.forward
        or isinstance(error, (NameError, RecursionError))
        or any(said in str(error) for said in lost)
    )


def _advice(module: nn.Module, error: Exception) -> str:
    """What to do, by what stopped it."""
    said = str(error)
    if _library(module) == "transformers":
        return (
            "Hugging Face models look at their arguments and shapes in Python while they run, which fx cannot follow. "
            "Write the part that is needed as an nn.Module with fixed arguments, of torch.nn layers (such as "
            "nn.TransformerEncoder), or compose it of layers of tangency.infinite."
        )
    if "not installed as a submodule" in said or "not a member of this module" in said:
        return "Register its modules and parameters: as attributes, or in nn.ModuleList and nn.ParameterList."
    if isinstance(error, RecursionError):
        return "Its forward() calls itself without an end that tracing could see; unroll it, or compose layers."
    if any(word in said for word in ("co_varnames", "Proxy", "'StandIn'")):
        return (
            "Its forward() takes a variable number of arguments, or works on them as Python values. Wrap it into a "
            "module whose forward(x) calls it with fixed arguments and tensor operations alone, or give the network as "
            "layers of tangency.infinite."
        )
    return (
        "Write that line without control flow on values or shapes of tensors, wrap the part that is needed into a "
        "module with fixed arguments, or give the network as layers of tangency.infinite."
    )


def _library(module: nn.Module) -> str:
    """The first package among those of its parts that is neither torch nor the user's own module."""
    kinds = {type(m).__module__.partition(".")[0] for m in module.modules()}
    return "transformers" if "transformers" in kinds else ""


def line_of_error(error: BaseException) -> str:
    """The last line outside of torch."""
    # The user's line is above those of torch and of this package, where the error was raised.
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if not _ours(f.filename)]
    if not lines:
        return "an unknown line"
    return f"{lines[-1].filename}:{lines[-1].lineno} ({lines[-1].line})"


def line_of(node: fx.Node) -> str:
    """Where in the user's code a node comes from."""
    return shown_line(node.meta.get("line"))


def shown_line(line: tuple[str, int] | None) -> str:
    """A line of code as messages show it; "" for none."""
    return f"{line[0]}:{line[1]} ({linecache.getline(*line).strip()})" if line is not None else ""


def users_line() -> tuple[str, int] | None:
    """File and line of the innermost call outside of torch and of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _ours(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


def _ours(file: str) -> bool:
    """Whether a file is torch's or one of those that read networks, so none of the user's."""
    return "/torch/" in file or "/tangency/infinite/" in file


def changed_node(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The node whose value this one changes in place."""
    first = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(first, fx.Node):
        return None
    if node.op == "call_method":
        inside = str(node.target).endswith("_") and not str(node.target).endswith("__")
    elif node.op == "call_module":
        m = modules.get(str(node.target))
        inside = bool(getattr(m, "inplace", False)) and not (isinstance(m, _DropoutNd) and not m.training)
    elif node.op == "call_function":
        inside = node.target in _IN_PLACE or _by_function(node)
    else:
        return None
    return first if inside else None


def _by_function(node: fx.Node) -> bool:
    """relu_(x), F.relu(x, True), F.relu(x, inplace=True)."""
    name = getattr(node.target, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or bool(node.kwargs.get("inplace")):
        return True
    try:
        order = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    # inplace may be given by position.
    place = order.index("inplace") if "inplace" in order else len(node.args)
    return place < len(node.args) and bool(node.args[place])


def _spoiled(nodes: fx.Graph, changes: dict[fx.Node, fx.Node], modules: dict[str, nn.Module]) -> dict[fx.Node, fx.Node]:
    """Nodes that change a value in place (`changes`) which a later one reads under its old name; that later one."""
    # A change in place is right as long as nobody reads the old name, or a view, after it.
    order = {node: k for k, node in enumerate(nodes.nodes)}
    readers = {}
    for node, value in changes.items():
        for alias in _aliases(value, node, order, modules):
            later = [u for u in alias.users if order[u] > order[node]]
            if later:
                readers[node] = later[0]
    return readers


def _aliases(value: fx.Node, until: fx.Node, order: dict[fx.Node, int], modules: dict[str, nn.Module]) -> set[fx.Node]:
    """All nodes before `until` that lie in the same memory."""
    # To the tensor that is viewed first, then to all views of it.
    while (before := _shown(value, modules)) is not None:
        value = before
    aliases, waiting = {value}, [value]
    while waiting:
        for user in waiting.pop().users:
            if user not in aliases and order[user] < order[until] and _shown(user, modules) in aliases:
                aliases.add(user)
                waiting.append(user)
    return aliases


def _shown(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The node that this one is a view of, or the same as."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if node.op == "call_module":
        m = modules.get(str(node.target))
        same = type(m).__name__ in _VIEWS or (isinstance(m, _DropoutNd) and not m.training)
    else:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        same = node.op in ("call_method", "call_function") and name in _VIEWS
    return first if same or changed_node(node, modules) is first else None


def same_outputs(source: nn.Module, graph: ModuleGraph, args: Args, kwargs: Kwargs) -> bool:
    """Whether the graph computes what the module does, for these inputs; True where the module itself does not run.

    Tracing cannot see what is decided outside of tensors: isinstance(x, Tensor) is False of fx's stand-in.
    """
    # Inputs are float64 by now; the module runs in its own dtype.
    kind = next((p.dtype for p in source.parameters() if p.is_floating_point()), torch.float64)
    training = any(m.training for m in source.modules())

    def copied(v: Tensor) -> Tensor:
        """Each run gets tensors of its own, for it may change them in place."""
        if not v.is_floating_point():
            return v.clone()
        # Both run on the same numbers, whichever: not on those that overflow in the module's own type.
        largest = float(v.abs().max()) if v.numel() else 0.0
        return (v / largest if largest > torch.finfo(kind).max ** 0.5 else v).to(kind, copy=True)

    outputs = []
    for module in (source, fx.GraphModule(graph.root, graph.nodes)):
        if training and any(True for _ in module.buffers()):
            module = copy.deepcopy(module)  # running statistics stay as they are
        own_args = [tree.transform(copied, v) for v in args]
        own_kwargs = {k: tree.transform(copied, v) for k, v in kwargs.items()}
        try:
            with torch.no_grad(), torch.random.fork_rng(enabled=training):
                if training:
                    torch.manual_seed(0)  # dropout's masks
                value = module(*own_args, **own_kwargs)
        except Exception:  # reading says what is wrong
            return True
        outputs.append([v for v in tree_leaves(value) if isinstance(v, Tensor)])
    first, second = outputs
    return len(first) == len(second) and all(alike(a, b) for a, b in zip(first, second, strict=True))


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are the same, NaN included."""
    # Up to rounding in float32, by fused and other orders of the same sums.
    # Of what is finite: large inputs may overflow on their way.
    scale = float(a.abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * scale + 1e-12, equal_nan=True)


def entries(value: object) -> Iterator[tuple[object, object]]:
    """What a dict, tuple or list holds, by its keys or numbers; nothing of others."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (tuple, list)):
        yield from enumerate(value)
