"""Refusals that need no inputs: a layer or function without a limit that a traced graph gives random values to.

Only what is certain: values that come out of a layer with weights are random whatever the inputs are. The rest is said
when a batch is read.
"""

from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from ..layers.weights import Weights
from ..moments.fields import Builder
from .calls import Call, Keywords
from .functional import REFUSED, find_rule, no_rule
from .graphs import ModuleGraph, line_of
from .modules import NO_LIMIT, no_limit
from .uses import claim, use_of

# What gives numbers, or several values of which some may be known.
_NO_VALUE = {
    "getattr", "getitem", "size", "dim", "ndimension", "numel", "chunk", "split", "split_with_sizes", "tensor_split",
    "unbind", "topk", "max", "min", "meshgrid",
}  # fmt: skip


def refuse_early(graph: ModuleGraph) -> None:
    """Raise what reading any batch would raise."""
    modules, random = dict(graph.root.named_modules()), set[fx.Node]()
    build = Builder(1)  # whose weights were used already
    for node in graph.nodes.nodes:
        first = node.args[0] if node.args else None
        given = isinstance(first, fx.Node) and first in random
        if node.op == "call_module":
            module = modules[str(node.target)]
            name = str(node.target).removeprefix("0") if graph.single else str(node.target)
            if given:
                _check_module(module, name)
            build.where = _where(module, name)
            claim(build, module.parameters(), use_of(module), name)
            if given or isinstance(module, (nn.Linear, nn.Embedding, _ConvNd)):
                random.add(node)
        elif given and node.op in ("call_function", "call_method"):
            label = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            _check_function(node, label)
            if label not in _NO_VALUE:
                random.add(node)


def _where(module: nn.Module, name: str) -> str:
    return f"{'layer ' + name if name else 'the module'} ({type(module).__name__})"


def _check_module(module: nn.Module, name: str) -> None:
    """As `read_module` says it."""
    build = Builder(1, where=_where(module, name))
    for kind in type(module).__mro__:
        if kind in NO_LIMIT:
            raise no_limit(build, kind)


def _check_function(node: fx.Node, label: str) -> None:
    """As `Reading` says it."""
    build = Builder(1, where=f"{label} at {at}" if (at := line_of(node)) else label)
    rule = find_rule(node.target)
    if rule is None:
        raise no_rule(build)
    if rule in REFUSED:
        rule(Call(build, Weights(), (), Keywords(), label))
