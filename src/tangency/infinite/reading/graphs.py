"""A module's graph by torch.fx, with what fx itself passes over: no_grad, changes in place, random numbers."""

import copy
import inspect
import operator
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from ..._base import tree
from ...engine import borrow
from ...errors import TangencyError, UnsupportedModule
from ..layers.twin import Twin
from .faithful import Settled, check, check_leaf

# What returns its input, or a view of it: a change in place of one is a change of both.
_VIEWS = {
    "view", "reshape", "flatten", "transpose", "swapaxes", "swapdims", "permute", "movedim", "t", "squeeze",
    "unsqueeze", "unflatten", "expand", "expand_as", "chunk", "split", "narrow", "select", "contiguous", "to",
    "type_as", "float", "double", "detach", "getitem", "getattr", "view_as", "Identity", "Flatten", "Unflatten",
}  # fmt: skip
_IN_PLACE = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow, operator.ifloordiv, operator.imod,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.setitem,
}  # fmt: skip


class Value(fx.Proxy):
    """fx's stand-in for a tensor; x += y stays a change in place (fx would make it x + y)."""


def _in_place(target: Any) -> Callable[[Value, Any], fx.Proxy]:
    def change(self: Value, other: Any) -> fx.Proxy:
        found: fx.Proxy = self.tracer.create_proxy("call_function", target, (self, other), {})
        return found

    return change


for _target in _IN_PLACE - {operator.setitem}:
    setattr(Value, f"__{_target.__name__}__", _in_place(_target))


class Tracer(fx.Tracer):
    """Goes into the user's own modules; torch's are read as they are. `met` are all that were called, by name."""

    def __init__(self, single: bool) -> None:
        super().__init__()
        self.record_stack_traces = True
        self.single = single
        self.thread = threading.get_ident()
        self.met: dict[str, nn.Module] = {}
        self.asked: Exception | None = None  # a question about values that forward() asked and caught the error of

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.asked = fx.proxy.TraceError("control flow on a tensor's value")
        return super().to_bool(obj)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, Twin):
            return True
        own = type(m).__module__.startswith(("torch.nn", "torch.ao.nn"))
        return own and not isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict))

    # While fx traces, every nn.Module of the process calls these two: models of other threads go their own way.
    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        name = path.removeprefix("0") if self.single else path
        faithful(self, name, m)
        self.met[name] = m
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["cut"] = not torch.is_grad_enabled()
        return node


def faithful(tracer: Tracer, name: str, m: nn.Module) -> None:
    (check_leaf if tracer.is_leaf_module(m, name) else check)(m, name)


def traced(root: nn.Module, module: nn.Module, tracer: Tracer) -> fx.Graph:
    """The module's graph; what cannot be traced gets the line where tracing stopped."""
    try:
        # One trace at a time: two that overlap would each put back what the other left in nn.Module.
        with borrow.TURN, torch.enable_grad(), Settled(f"forward() of {type(module).__name__}"):
            graph = tracer.trace(root)
            if tracer.asked is not None:  # and went on
                raise tracer.asked
    except TangencyError:
        raise
    except Exception as e:
        raise UnsupportedModule(
            f"{type(module).__name__} cannot be traced by torch.fx, at {_line(e)}: {type(e).__name__}: {e}. "
            + _advice(module, e)
        ) from e
    return graph


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
    if any(word in said for word in ("co_varnames", "Proxy", "'Value'")):
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


def _line(error: BaseException) -> str:
    """The last line outside of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/torch/" not in f.filename and "/tangency/infinite/" not in f.filename]
    if not own:
        return "an unknown line"
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})"


def stack(node: fx.Node) -> str:
    """Where in the user's code a node comes from."""
    lines = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s+([^\n]+)', node.stack_trace or "")
    own = [f for f in lines if "/torch/" not in f[0] and "/tangency/infinite/" not in f[0]]
    return f"{own[-1][0]}:{own[-1][1]} ({own[-1][2].strip()})" if own else ""


def changed(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
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
    place = order.index("inplace") if "inplace" in order else len(node.args)
    return place < len(node.args) and bool(node.args[place])


def spoiled(graph: fx.Graph, modules: dict[str, nn.Module]) -> dict[fx.Node, fx.Node]:
    """Nodes that change a value in place which a later one reads under its old name; that later one."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    found = {}
    for node in graph.nodes:
        value = changed(node, modules)
        for alias in () if value is None else _aliases(value, node, order, modules):
            later = [u for u in alias.users if order[u] > order[node]]
            if later:
                found[node] = later[0]
    return found


def _aliases(value: fx.Node, until: fx.Node, order: dict[fx.Node, int], modules: dict[str, nn.Module]) -> set[fx.Node]:
    """All nodes before `until` that lie in the same memory."""
    while (before := _shown(value, modules)) is not None:
        value = before
    found, waiting = {value}, [value]
    while waiting:
        for user in waiting.pop().users:
            if user not in found and order[user] < order[until] and _shown(user, modules) in found:
                found.add(user)
                waiting.append(user)
    return found


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
    return first if same or changed(node, modules) is first else None


def in_place(graph: fx.Graph, modules: dict[str, nn.Module]) -> bool:
    return any(changed(node, modules) is not None for node in graph.nodes)


def same_outputs(source: nn.Module, root: nn.Module, graph: fx.Graph, x: Any) -> bool:
    """Whether the graph computes what the module does, for these inputs; True where the module itself does not run.

    Tracing cannot see what is decided outside of tensors: isinstance(x, Tensor) is False of fx's stand-in.
    """
    kind = next((p.dtype for p in source.parameters() if p.is_floating_point()), torch.float64)
    x = tree.transform(lambda v: v.to(kind, copy=True) if v.is_floating_point() else v.clone(), x)
    training = any(m.training for m in source.modules())
    found = []
    for module in (source, fx.GraphModule(root, graph)):
        if training and any(True for _ in module.buffers()):
            module = copy.deepcopy(module)  # running statistics stay as they are
        try:
            found.append(_outputs(module, tree.transform(torch.clone, x), training))
        except Exception:  # reading says what is wrong
            return True
    first, second = found
    return len(first) == len(second) and all(_alike(a, b) for a, b in zip(first, second, strict=True))


def _outputs(module: nn.Module, x: Any, training: bool) -> list[Tensor]:
    args, kwargs = tree.arguments(x)
    with torch.no_grad(), torch.random.fork_rng(enabled=training):
        if training:
            torch.manual_seed(0)  # dropout's masks
        return [v for v in tree_leaves(module(*args, **kwargs)) if isinstance(v, Tensor)]


def _alike(a: Tensor, b: Tensor) -> bool:
    scale = float(a.abs().max()) if a.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * scale + 1e-12, equal_nan=True)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from leaves(v)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))
    else:
        yield value
