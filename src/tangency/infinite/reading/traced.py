"""An nn.Module as a layer, by its graph: its calls become layers, what it does to tensors operations on positions.

What depends on the input alone is computed as it stands; from the first weights on, values are random fields.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from ..._base import tree
from ..._base.fingerprint import architecture, digest
from ..._base.types import Json, Spec
from ...errors import InputError, TangencyError, UnsupportedModule
from ..layers.basic import Argument, Layer
from ..layers.gated import gate_rows
from ..layers.weights import Weights, dotted
from ..moments.fields import Builder
from ..moments.values import Value
from . import gated, multihead, sequences  # noqa: F401  (they enter their readers)
from .biases import looked_up
from .calls import RANDOM, Args, Call, JoinedBias, Keywords, Kwargs, Parameter, TorchFunction
from .early import refuse_early
from .faithful import check_root
from .functional import AS_VALUES, find_rule, no_rule
from .graphs import ModuleGraph, Settled, entries, line_of, same_outputs, trace_module, training_modes
from .merged import merged_input
from .modules import as_known, read_module
from .says import module_limits
from .uses import claim, use_of, using

# Functions that pick entries of a parameter, or turn their order, and make no new ones.
PICKS = {"index_select", "gather", "take_along_dim", "flip", "roll", "repeat_interleave", "unfold", "tile"}


@dataclass(frozen=True)
class Traced(Layer):
    """A module, by its graph."""

    source: nn.Module
    graph: ModuleGraph = field(init=False, repr=False, compare=False)
    verified: set[str] = field(init=False, repr=False, compare=False)  # forms of inputs for which the graph is right

    def __post_init__(self) -> None:
        check_root(self.source)
        object.__setattr__(self, "graph", trace_module(self.source))
        refuse_early(self.graph)
        object.__setattr__(self, "verified", set())

    def __getstate__(self) -> dict[str, nn.Module]:
        return {"source": self.source}  # the graph holds functions that pickle does not take; it is traced again

    def __setstate__(self, state: dict[str, nn.Module]) -> None:
        object.__setattr__(self, "source", state["source"])
        self.__post_init__()

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`: one run over the graph."""
        self._look_again()
        after = Reading(self.graph, build, without_frozen(weights, self.source, name), name).run(value)
        self._verify(value)
        return after

    def _look_again(self) -> None:
        """What may have changed since the trace: hooks, weights, the modes of training or evaluation."""
        check_root(self.source)
        for name, m in self.graph.tracer.met.items():
            self.graph.tracer.check(name, m)
        if training_modes(self.source) != self.graph.modes:
            self.__post_init__()

    def _verify(self, value: Argument) -> None:
        """Once for each form of inputs: the graph must compute what the module does."""
        # Random values cannot be run through the module, so there is nothing to compare.
        if any(not isinstance(v, Tensor) for v in flat(value)):
            return  # hidden values of layers before it
        form = str([(label, v.shape[1:], v.dtype) for label, v in tree.leaves(value)])
        if form in self.verified:
            return
        # Two samples: with one, what is done along the batch would not show.
        args, kwargs = tree.arguments(tree.take(value, slice(0, 2)))
        if not same_outputs(self.source, self.graph, args, kwargs):
            raise UnsupportedModule(
                f"{type(self.source).__name__}: its forward() gives other values than what torch.fx traced of it, so "
                "it does something that tracing passes over: it asks for types (isinstance(x, Tensor) is False there), "
                "catches errors, keeps a state, or draws Python's or NumPy's random numbers. Write it without."
            )
        self.verified.add(form)

    def module(self, width: int) -> nn.Module:
        """The module itself; its widths are its own."""
        return self.source

    def spec(self) -> Spec:
        """As `Layer.spec`: the module's form, its forward(), its known tensors, and its modes."""
        # Buffers and constants decide numbers as they are; parameters do so by their variances, in `numbers`.
        code, constants = self._code()
        slopes = {k: m.weight for k, m in self.source.named_modules() if isinstance(m, nn.PReLU)}
        known = {
            **dict(self.source.named_buffers()),
            **{k: v for k, v in constants.items() if isinstance(v, Tensor)},
            **slopes,
        }
        modes = "".join("t" if training else "e" for training in training_modes(self.source))
        return {
            "model": architecture(self.source),
            "forward": hashlib.sha256(code.encode()).hexdigest()[:16],
            "known": digest(known),
            "training": hashlib.sha256(modes.encode()).hexdigest()[:8] if "t" in modes and "e" in modes else modes[:1],
        }

    def _code(self) -> tuple[str, dict[str, object]]:
        """What forward() does, as text, and what it holds besides modules."""
        nodes, root = self.graph.nodes, self.graph.root
        return str(nodes), {str(n.target): _attribute(root, str(n.target)) for n in nodes.nodes if n.op == "get_attr"}

    def numbers(self, weights: Weights) -> dict[str, Json]:
        """What each layer's weights were taken for."""
        fresh = replace(weights, record={})
        for name, m in self.source.named_modules():
            if any(isinstance(p, nn.UninitializedParameter) for p in m.parameters(recurse=False)):
                raise InputError(f"{name} is lazy and has no weights yet. Call the model once first.")
            _note_weights(fresh, name, m)
        return fresh.record

    def says(self) -> dict[str, Json]:
        """As `Layer.says`, of every module that has a limit of its own."""
        return module_limits(self.source)


def _note_weights(weights: Weights, name: str, m: nn.Module) -> None:
    """Let the weights of one module be decided, for the record."""
    weight, bias = getattr(m, "weight", None), getattr(m, "bias", None)
    if isinstance(m, (nn.Linear, _ConvNd)) and isinstance(weight, Tensor):
        groups = getattr(m, "groups", 1)
        transposed = getattr(m, "transposed", False)
        fan_in = weight.shape[0] // groups * weight[0, 0].numel() if transposed else weight[0].numel()
        weights.layer(name, fan_in, bias=bias is not None, tensors=(weight, bias))
    elif isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
        weights.layer(name, 1, bias=False, tensors=(weight, None))
    elif isinstance(m, nn.Bilinear):
        weights.layer(name, m.weight[0].numel(), bias=bias is not None, tensors=(m.weight, m.bias))
    elif isinstance(m, (nn.LSTM, nn.GRU)):
        for w_name in [n for n, _ in m.named_parameters(recurse=False) if n.startswith(("weight_ih", "weight_hh"))]:
            names = (w_name, w_name.replace("weight", "bias"))
            for gate, (p, b) in gate_rows(m, names).items():
                weights.layer(name, p.shape[1], bias=b is not None, tensors=(p, b), names=names)
                weights.record[dotted(name, w_name, gate)] = weights.record.pop(name or w_name)
    elif isinstance(m, (nn.RNNBase, nn.MultiheadAttention)):
        for w_name, p in m.named_parameters(recurse=False):
            if w_name.startswith(("weight", "in_proj_weight", "q_proj", "k_proj", "v_proj")):
                b_name = w_name.replace("weight", "bias")
                b = getattr(m, b_name, None)
                weights.layer(name, p.shape[1], bias=b is not None, tensors=(p, b), names=(w_name, b_name))
                # Several weights of one module: each goes by its own name in the record.
                weights.record[dotted(name, w_name)] = weights.record.pop(name or w_name)


def _attribute(root: nn.Module, target: str) -> object:
    value: object = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


def without_frozen(weights: Weights, source: nn.Module, name: str) -> Weights:
    """A module among layers keeps what it has frozen, unless `trainable=` says which parameters count."""
    if not name or weights.chosen:
        return weights
    frozen = {dotted(name, n) for n, p in source.named_parameters() if not p.requires_grad}
    return replace(weights, frozen=weights.frozen | frozen) if frozen else weights


class Reading:
    """One run over a graph: values are tensors, fields, numbers, tuples."""

    def __init__(self, graph: ModuleGraph, build: Builder, weights: Weights, name: str) -> None:
        self.graph, self.build, self.weights, self.prefix = graph, build, weights, name
        self.modules = dict(graph.root.named_modules())
        self.fixed: set[fx.Node] = set()  # known values that no input decides: they have no batch
        # By identity: the name that `trainable=` and variances know. And the parameters that forward() asked for.
        self.listed = {id(p): n.removeprefix("0.") if graph.single else n for n, p in graph.root.named_parameters()}

    def run(self, value: Argument) -> Value:
        """The network's output."""
        env: dict[fx.Node, Argument] = {}
        if self.graph.in_place:  # the user's tensors stay as they are
            value = tree.transform(torch.clone, value)
        inputs = _inputs(self.graph.nodes, value)
        # A module may stand among layers, whose names messages go on with.
        was = self.build.where, self.build.name
        try:
            for node in self.graph.nodes.nodes:
                if node.op == "placeholder":
                    env[node] = inputs[str(node.target)]
                elif node.op == "output":
                    output = fx.map_arg(node.args[0], lambda n: env[n])
                    return output if isinstance(output, RANDOM) else _only_output(output, self.build)
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

    def step(self, node: fx.Node, args: Args, kwargs: Kwargs) -> object:
        """One node; what it fails with says where, and that it is the module that could not be read."""
        try:
            if node.op == "get_attr":
                return self._constant(node)
            random = parametric = False
            for v in flat((args, kwargs)):
                random = random or isinstance(v, RANDOM)
                parametric = parametric or isinstance(v, (Parameter, JoinedBias))
            if node.op == "call_module":
                return self._module(node, args, kwargs, random, parametric)
            return self._function(node, args, kwargs, random or parametric)
        except (TangencyError, Warning, MemoryError, torch.OutOfMemoryError):  # a warning that is to be an error
            raise
        except Exception as e:
            given = [v.name for v in flat((args, kwargs)) if isinstance(v, Parameter)]
            if given and isinstance(e, (AttributeError, TypeError, AssertionError)):
                raise self.build.unsupported(
                    f"is given the parameter {given[0]} itself, for which it has no rule.",
                    "Add it to values, join it with them, take rows of it (p[index]), or multiply values by it.",
                ) from e
            raise UnsupportedModule(
                f"{self.build.where}: could not be read for these inputs, {type(e).__name__}: {e}. Call the model with "
                "them; if that works, use a torch.nn layer there or layers of tangency.infinite."
            ) from e

    def _module(self, node: fx.Node, args: Args, kwargs: Kwargs, random: bool, parametric: bool) -> object:
        """The value after one of torch's modules."""
        build, module = self.build, self.modules[str(node.target)]
        name = self._name(node)
        build.name, build.where = name, f"{'layer ' + name if name else 'the module'} ({type(module).__name__})"
        weighted = _weighted(module)
        if random or parametric or weighted:
            self._check_shown(node)
        if not random and not weighted:
            with Settled(build.where):
                known: object = as_known(module, *args, **kwargs)
                return known
        # Known tensors went through above: from here on the layer's weights count as random.
        use, name = use_of(module), self._listed(module, name)
        if isinstance(module, nn.Embedding) and node.all_input_nodes[0] in self.fixed:
            plain = module.padding_idx is None and module.max_norm is None and not module.scale_grad_by_freq
            table = Parameter(module.weight, dotted(name, "weight"), layer=name)
            if plain and (bias := looked_up(node, args[0] if args else kwargs["input"], table)) is not None:
                return bias
            args, kwargs = (self._for_all(args[0] if args else kwargs["input"]),), {}
        if args and isinstance(args[0], Tensor) and isinstance(module, (nn.Linear, _ConvNd)):
            args = (self._with_batch(args[0], node, isinstance(module, _ConvNd)), *args[1:])
        claim(build, module.parameters(), use, name)
        call = Call(build, self.weights, args, Keywords(kwargs), type(module).__name__, name)
        with using(build, use):
            return read_module(module, call)

    def _with_batch(self, value: Tensor, node: fx.Node, channels_first: bool) -> Value:
        """A known tensor as a layer's input: its rows are samples, or samples merged with positions (frames)."""
        build = self.build
        if value.dim() < 2 or len(value) == build.size:
            return value
        if node.all_input_nodes[0] in self.fixed or len(value) % build.size:
            raise build.unsupported(
                f"is given known values of {len(value)} rows, which are not its samples ({build.size}).",
                "Give them a batch axis: table.expand(len(x), …), and the layer takes their positions.",
            )
        return merged_input(build, value, channels_first)

    def _for_all(self, index: Tensor) -> Tensor:
        """Indices into a table of positions, which are the same for every sample: one of them for each."""
        size = self.build.size
        whole = index.dim() > 1 and index.shape[0] in (1, size)  # with an axis for the batch already
        index = index if whole else index.unsqueeze(0)
        return index.expand(size, *index.shape[1:])

    def _function(self, node: fx.Node, args: Args, kwargs: Kwargs, random: bool) -> object:
        """The value after a function or a method."""
        build, target = self.build, node.target
        label = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        at = line_of(node)
        build.where = f"{label} at {at}" if at else label
        build.name = dotted(self.prefix, node.name)
        if not random:
            with Settled(build.where):
                if isinstance(target, str):
                    target, args = getattr(args[0], target), args[1:]
                known: object = target(*args, **kwargs)
                return known
        self._check_shown(node)
        picked = self._picked(target, args, kwargs)
        if picked is not None:
            return picked
        rule = find_rule(target)
        if rule is None:
            raise no_rule(build)
        if target is F.embedding and args and node.all_input_nodes[0] in self.fixed:
            args = (self._for_all(args[0]), *args[1:])
        options = Keywords(kwargs)
        parameters = [v for v in flat((args, kwargs)) if isinstance(v, Parameter)]
        form = tuple((p.name, p.form(), p.factor) for p in parameters)
        use = ("value" if rule in AS_VALUES else target, form)  # joined and added are one use: as a value
        with using(build, use if parameters else None):
            value = rule(Call(build, self.weights, args, options, label))
        # Another form of a parameter, or its shape, is no use of it.
        if parameters and any(isinstance(v, (Tensor, *RANDOM)) for v in flat((value,))):
            for p in parameters:
                claim(build, [p.whole_table()], use, p.name, p.entries if p.forms else None)
        if missed := options.missed():
            raise build.unsupported(f"is given {missed}, which is not read for random values.", "Leave it out.")
        return value

    def _picked(self, target: TorchFunction | str, args: Args, kwargs: Kwargs) -> Parameter | None:
        """Entries of a parameter in another order or form, by known numbers; None where it is something else."""
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name not in PICKS or not args or not isinstance(args[0], Parameter):
            return None
        pick, rest = getattr(torch.Tensor, name), args[1:]
        return args[0].formed(lambda v: pick(v, *rest, **kwargs))

    def _check_shown(self, node: fx.Node) -> None:
        """What a graph does not show of random values: gradients that are cut, and changes under another name."""
        if node.meta.get("cut"):
            raise self.build.unsupported(
                "runs without gradients (torch.no_grad, or an autograd.Function), which the limit would not.",
                "Freeze its parameters instead, by requires_grad_(False) or trainable=; an autograd.Function is looked "
                "into where forward() calls its apply by the class, Name.apply(…).",
            )
        if node in self.graph.spoiled:
            reader = self.graph.spoiled[node]
            raise self.build.unsupported(
                f"changes a value in place that is read later under its old name, at {line_of(reader) or reader.name}.",
                "Use the form that returns a new value (inplace=False, x = x + y).",
            )

    def _name(self, node: fx.Node) -> str:
        """Of a module or parameter, within the whole network."""
        target = str(node.target)
        return dotted(self.prefix, target.removeprefix("0") if self.graph.single else target)

    def _constant(self, node: fx.Node) -> object:
        """A tensor that the module holds: a parameter is random, a buffer known."""
        value, name = _attribute(self.graph.root, str(node.target)), self._name(node)
        if not isinstance(value, nn.Parameter):
            if isinstance(value, Tensor) and value.requires_grad:
                self.build.where = f"{name} (a tensor)"
                raise self.build.unsupported(
                    "requires a gradient but is no parameter: it is made of others, or was not registered.",
                    "Make it an nn.Parameter of the module and compute with it in forward(), or detach() it.",
                )
            return value
        # Asking for its shape is no use of it.
        uses = [u for u in node.users if u.target not in (getattr, "size", "dim") or u.args[1:2] in (("T",), ("mT",))]
        at = line_of(uses[-1]) if uses else ""
        label = getattr(uses[-1].target, "__name__", str(uses[-1].target)) if uses else name
        self.build.where = f"{label} at {at}" if at else f"{name} (a parameter)"
        if not uses:  # asked for its device or type: no use of its numbers
            return Parameter(value, name)
        name = dotted(self.prefix, self.listed[id(value)]) if id(value) in self.listed else name
        return Parameter(value, name)

    def _listed(self, module: nn.Module, name: str) -> str:
        """The name under which a module's parameters are known: that of the first module that has them."""
        own = dict(module.named_parameters(recurse=False))
        names = [(attribute, self.listed.get(id(p), "")) for attribute, p in own.items()]
        owners = {whole.removesuffix(attribute).removesuffix(".") for attribute, whole in names}
        alike = len(owners) == 1 and all(whole.endswith(attribute) for attribute, whole in names)
        return dotted(self.prefix, owners.pop()) if alike else name


def _inputs(graph: fx.Graph, value: object) -> dict[str, object]:
    """The inputs by the names of forward()'s arguments (as fx writes them: "*args" and "**kwargs" with their stars)."""
    # fx makes a placeholder of each argument, with its default as argument of the node.
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    names = [str(node.target) for node in placeholders if not str(node.target).startswith("*")]
    needed = [str(node.target) for node in placeholders if not node.args and not str(node.target).startswith("*")]
    rest = [str(node.target) for node in placeholders if str(node.target).startswith("*")]
    inputs: dict[str, object] = {name: {} if name.startswith("**") else () for name in rest}
    inputs |= {str(node.target): node.args[0] for node in placeholders if node.args}
    if isinstance(value, Mapping):
        given = dict(value)
        if unknown := sorted(str(n) for n in given if n not in names):
            raise InputError(f"inputs {unknown} were given by name; the model takes {names}.")
    else:
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        given = dict(zip(names, values, strict=False))
        star = [name for name in rest if not name.startswith("**")]
        if len(values) > len(names) and not star:
            raise InputError(
                f"{len(values)} inputs were given; the model takes {names}. Of a list of samples make one tensor: "
                "torch.stack(x), of arrays numpy.stack(x)."
            )
        given |= {name: tuple(values[len(names) :]) for name in star}
    if any(name not in given for name in needed):
        raise InputError(f"the model takes {names}; given were {sorted(given)}.")
    return inputs | given


def _only_output(value: object, build: Builder) -> Value:
    """The network's output: a tensor that no weights decide, the logits of a dict, or the only random value in it."""
    if isinstance(value, Mapping) and isinstance(value.get("logits"), RANDOM):
        return value["logits"]  # as `trace_ntk` picks it
    if isinstance(value, (Mapping, tuple, list)):
        outputs = {label: v for label, v in _labelled(value) if isinstance(v, RANDOM)}
        if len(outputs) != 1:
            found = f": {', '.join(outputs)}" if any(outputs) else ""
            build.where = "the output"
            raise build.unsupported(
                f"forward() returns {len(outputs)} random values{found}.",
                "Return one tensor: put the model into a module whose forward() picks it, or that pools and reads it.",
            )
        return next(iter(outputs.values()))
    if not isinstance(value, Tensor):
        raise build.unsupported(f"the model returns a {type(value).__name__}.", "Return one tensor.")
    return value


def _labelled(value: object, label: str = "") -> Iterator[tuple[str, object]]:
    """What tuples and dicts within each other hold, with the way to it."""
    if not isinstance(value, (Mapping, tuple, list)):
        yield label, value
    for key, v in entries(value):
        yield from _labelled(v, dotted(label, str(key)))


def _weighted(module: nn.Module) -> bool:
    """Whether its output is random although its input is known."""
    return any(True for _ in module.parameters()) or (module.training and isinstance(module, (_DropoutNd, _BatchNorm)))


def flat(value: object) -> Iterator[object]:
    """What tuples, lists and dicts within each other hold."""
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from flat(v)
    elif isinstance(value, dict):
        yield from flat(tuple(value.values()))
    else:
        yield value
