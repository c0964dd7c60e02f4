"""A module that torch.fx cannot trace, as a layer: recorded anew for every batch, and compared with itself.

The user's module stays as it is (caches, buffers, modes): copies run, in the module's own type. Reading then computes
what is known in float64, but for constants that torch did not see made (by NumPy, in vmap).
"""

import copy
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from ..._base import tree
from ..._base.fingerprint import describe
from ..._base.types import Inputs
from ...engine.network import TURN
from ...errors import InputError, TangencyError, UnsupportedModule
from ..layers.basic import Argument, Layer
from ..layers.weights import Weights
from ..moments.fields import Builder
from ..moments.values import Value
from .calls import RANDOM, Args, Kwargs
from .faithful import check_root, exact
from .graphs import ModuleGraph, Untraceable, alike, examined, line_of, line_of_error, training_modes
from .recorder import Recorder, plain_outputs, watched
from .traced import Reading, Traced, without_frozen


def read_source(module: nn.Module) -> Layer:
    """A module as a layer: by torch.fx, or where that stops by running it."""
    try:
        return Traced(module)
    except Untraceable:
        return Recorded(module)


@dataclass(frozen=True)
class Recording:
    """One run of a module."""

    graph: ModuleGraph
    constants: dict[str, Tensor]  # what nobody saw made, by the name that the graph has for it
    questions: list[fx.Node]  # about values: their answers may have decided what was called

    def same(self, other: "Recording") -> bool:
        """Whether another run did the same, with the same constants."""
        values = zip(self.constants.values(), other.constants.values(), strict=False)
        return str(self.graph.nodes) == str(other.graph.nodes) and all(
            a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in values
        )

    def asked(self) -> fx.Node | None:
        """A question about values that an input decides; None if there is none."""
        of_input: set[fx.Node] = set()
        for node in self.graph.nodes.nodes:
            if node.op == "placeholder" or any(n in of_input for n in node.all_input_nodes):
                of_input.add(node)
        return next((node for node in self.questions if node in of_input), None)


@dataclass(frozen=True)
class Recorded(Traced):
    """A module, by running it on the batch at hand."""

    texts: dict[str, str] = field(init=False, repr=False, compare=False)  # what samples by themselves did, by form

    def __post_init__(self) -> None:
        check_root(self.source)
        object.__setattr__(self, "verified", set())
        object.__setattr__(self, "texts", {})

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`: one run of the module, and one over its graph."""
        check_root(self.source)
        inputs = _shaped(value, build.size)
        recording = record(self.source, inputs)
        graph = _for_reading(recording, self.source, inputs)
        after = Reading(graph, build, without_frozen(weights, self.source, name), name).run(value)
        # After reading, which says more of what it cannot take.
        form = str([(label, v.shape[1:], v.dtype) for label, v in tree.leaves(inputs)])
        if question := recording.asked():
            self._check_answers(form, question, inputs)
        sized = f"{form} of {build.size}"  # forward() may go by the size of the batch
        if sized not in self.verified:
            self._check(inputs)
            self.verified.add(sized)
        return after

    def _check(self, inputs: Inputs) -> None:
        """Another run does the same, whatever the weights, and samples do not mix."""
        recording, kind = record(self.source, inputs), type(self.source).__name__
        if not _replays(recording, self.source, inputs):
            raise UnsupportedModule(
                f"{kind}: run twice on the same inputs, its forward() gives other values: it keeps a state that it "
                "changes, or draws Python's or NumPy's random numbers. Write it without."
            )
        if not recording.same(record(self.source, inputs, redrawn=True)):
            raise UnsupportedModule(
                f"{kind}: what its forward() calls depends on the values of its weights, of which a limit has none. "
                "Write it without control flow on them."
            )
        if not _alone(self.source, inputs):
            raise UnsupportedModule(
                f"{kind}: its forward() gives another output for a sample alone than for the same one among others, so "
                "what it does depends on the size of the batch, or on all of its samples. Let it go by one sample."
            )

    def _check_answers(self, form: str, question: fx.Node, inputs: Inputs) -> None:
        """Where forward() asks for values of its input, all samples must go one way."""
        for k in range(tree.size(inputs)):
            text = str(record(self.source, tree.take(inputs, slice(k, k + 1))).graph.nodes)
            if self.texts.setdefault(form, text) != text:
                raise UnsupportedModule(
                    f"{line_of(question) or question.name}: forward() asks for values of its input there, and does "
                    "other things for some samples than for others, which are no inputs of one network then. Write "
                    "it without (torch.where), or give samples that go one way."
                )

    def _code(self) -> tuple[str, dict[str, object]]:
        """As `Traced._code`: by the code of all modules, for the graph is one of each batch."""
        kinds = {f"{type(m).__module__}.{type(m).__qualname__}": type(m) for m in self.source.modules()}
        return "\n".join(f"{name} {describe(kinds[name].forward)}" for name in sorted(kinds)), {}


def record(source: nn.Module, inputs: Inputs, redrawn: bool = False) -> Recording:
    """Run a copy of the module, and write down what it does; `redrawn`: with other weights."""
    working = _copied(source)
    if redrawn:
        _redraw(working)
    _quiet(working)
    args, kwargs = _arguments(source, inputs)
    recorder = Recorder(working, dict(source.named_modules()))
    recorder.begin(_names(source, args, kwargs))
    try:
        # Saved for no backward pass: gradients are on only to know where forward() turns them off.
        with TURN, _apart(source), torch.enable_grad(), saved_tensors_hooks(lambda v: None, lambda v: v):
            with watched(recorder):
                returned = working(*args, **kwargs)
            nodes = recorder.finish(plain_outputs(returned))
    except (TangencyError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        raise UnsupportedModule(
            f"{type(source).__name__} could not be read for these inputs: forward() stops{recorder.place()} at "
            f"{line_of_error(e)}: {type(e).__name__}: {e}. Call the model with them; a dict gives them by name."
        ) from e
    # Its parameters are the user's: whether two layers share one is told by where it lies.
    root = _copied(source, parameters=False)
    for name, v in recorder.constants.items():
        setattr(root, name, v)
    questions = [q for q in recorder.questions if q in set(nodes.nodes)]
    return Recording(
        examined(root, nodes, recorder.tracer, False, training_modes(source)), recorder.constants, questions
    )


def _copied(source: nn.Module, parameters: bool = True) -> nn.Module:
    """A copy of a module, with parameters of its own or the module's."""
    memo: dict[int, object] = {} if parameters else {id(p): p for p in source.parameters()}
    try:
        return copy.deepcopy(source, memo)
    except Exception as e:
        raise UnsupportedModule(
            f"{type(source).__name__} cannot be copied ({type(e).__name__}: {e}), and without a copy running it could "
            "change it. Keep on the module what copy.deepcopy takes."
        ) from e


def _quiet(copied: nn.Module) -> nn.Module:
    """torch's own BatchNorm in evaluation mode: it is one node, whatever it gives, and of one sample gives an error."""
    for m in copied.modules():
        if isinstance(m, _BatchNorm) and exact(m):
            m.eval()
    return copied


@torch.no_grad()
def _redraw(module: nn.Module) -> None:
    """Other weights of the same size."""
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        if p.is_floating_point():
            factor = torch.rand(p.shape, generator=generator) + 0.5
            p.mul_(factor.to(p)).add_(0.01 * (factor - 1).to(p))


def _apart(source: nn.Module) -> AbstractContextManager[None]:
    """The generators of the process stay as they are."""
    devices = {p.device for p in source.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(devices=[d.index or 0 for d in devices])


# Inputs


def _shaped(value: Argument, size: int) -> Any:
    """The inputs as tensors: hidden values of layers before the module are stood in for by numbers."""
    if isinstance(value, RANDOM):
        generator = torch.Generator().manual_seed(0)
        return torch.randn(size, *value.shape, generator=generator, dtype=torch.float64)
    if isinstance(value, Mapping):
        return {k: _shaped(v, size) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_shaped(v, size) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _arguments(source: nn.Module, inputs: Inputs) -> tuple[Args, Kwargs]:
    """args and kwargs of the module's call, in its own type and place; tensors of their own, for it may change them."""
    p = next((p for p in source.parameters() if p.is_floating_point()), None)
    kind, device = (p.dtype, p.device) if p is not None else (torch.float64, None)

    def own(v: Tensor) -> Tensor:
        """A tensor as the module takes it."""
        v = v.detach().to(device if device is not None else v.device, copy=True)
        return v.to(kind) if v.is_floating_point() else v

    return tree.arguments(tree.transform(own, inputs))


def _names(source: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, object]:
    """The arguments by name, in the order in which they are given."""
    names: list[str] = []
    for p in inspect.signature(source.forward).parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
    takes = list(inspect.signature(source.forward).parameters.values())
    if len(args) > len(names) and not any(p.kind is p.VAR_POSITIONAL for p in takes):
        raise InputError(
            f"{len(args)} inputs were given; the model takes {names}. Of a list of samples make one tensor: "
            "torch.stack(x), of arrays numpy.stack(x)."
        )
    known = {p.name for p in takes}
    if not any(p.kind is p.VAR_KEYWORD for p in takes) and (unknown := sorted(k for k in kwargs if k not in known)):
        raise InputError(f"inputs {unknown} were given by name; the model takes {names}.")
    names += [f"input_{k}" for k in range(len(names), len(args))]
    return dict(zip(names, args, strict=False)) | kwargs


# Whether a recording is to be trusted


def _outputs(module: nn.Module, inputs: Inputs) -> list[Tensor]:
    """All tensors that a copy of the module gives."""
    args, kwargs = _arguments(module, inputs)
    with torch.no_grad(), _apart(module):
        torch.manual_seed(0)  # dropout's masks
        return _tensors(_quiet(_copied(module))(*args, **kwargs))


def _tensors(returned: object) -> list[Tensor]:
    return [v for v in tree_leaves(plain_outputs(returned)) if isinstance(v, Tensor)]


def _replays(recording: Recording, source: nn.Module, inputs: Inputs) -> bool:
    """Whether the graph gives what the module does."""
    args, kwargs = _arguments(source, inputs)
    with torch.no_grad(), _apart(source):
        torch.manual_seed(0)
        given = [*args, *kwargs.values()]
        # Of a copy: the graph may change buffers in place.
        root = _quiet(copy.deepcopy(recording.graph.root))
        again = fx.Interpreter(root, graph=recording.graph.nodes).run(*given, enable_io_processing=False)
    first, second = _outputs(source, inputs), _tensors(again)
    return len(first) == len(second) and all(alike(a, b) for a, b in zip(first, second, strict=True))


def _alone(source: nn.Module, inputs: Inputs) -> bool:
    """Whether the outputs of the first and of the last sample are the same without the others."""
    n = tree.size(inputs)
    if n == 1 or any(isinstance(m, _BatchNorm) and not m.track_running_stats for m in source.modules()):
        return True
    module = _copied(source).eval()  # BatchNorm and dropout mix or draw in training: that is read as what it is
    together = _outputs(module, inputs)
    for at in (0, n - 1):
        by_itself = _outputs(module, tree.take(inputs, slice(at, at + 1)))
        if len(together) != len(by_itself):
            return False
        # What has no axis for samples is no output of theirs.
        pairs = [(a, b) for a, b in zip(together, by_itself, strict=True) if a.dim() and b.dim() and a.shape[0] == n]
        if not all(b.shape[0] == 1 and alike(a[at : at + 1], b) for a, b in pairs):
            return False
    return True


def _for_reading(recording: Recording, source: nn.Module, inputs: Inputs) -> ModuleGraph:
    """The graph with float64 in the place of the module's own type: known values keep all their digits."""
    p = next((p for p in source.parameters() if p.is_floating_point()), None)
    if p is None:
        return recording.graph
    device = next((v.device for _, v in tree.leaves(inputs)), p.device)

    def change(v: object) -> object:
        """One argument of a node."""
        if isinstance(v, torch.device) and v == p.device:
            return device
        return torch.float64 if v is p.dtype else v

    for node in recording.graph.nodes.nodes:
        node.args = fx.node.map_aggregate(node.args, change)  # type: ignore[arg-type]
        node.kwargs = fx.node.map_aggregate(node.kwargs, change)  # type: ignore[arg-type]
    if device != p.device:
        for name, v in recording.constants.items():
            setattr(recording.graph.root, name, v.to(device))
    return recording.graph
