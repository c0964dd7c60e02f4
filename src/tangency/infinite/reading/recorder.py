"""A module's graph by running it: every torch function and every layer of torch's that it calls becomes a node.

For what torch.fx cannot trace: control flow on shapes and known values, any number of arguments, wrappers that look at
their inputs in Python. Sizes and other numbers that forward() computed are those of the batch at hand, so a recording
is one of this batch; `recorded.py` makes one for every batch, and says when it is to be trusted.
"""

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from ...errors import UnsupportedModule
from .calls import Args, Kwargs, TorchFunction
from .custom import functions_followed
from .faithful import check_module
from .graphs import Tracer, changed_node, entries, shown_line, users_line

# What is asked of a tensor's form, not of its numbers: the answer is a number or type of this batch.
FORM = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "is_same_size", "is_shared", "is_pinned", "type",
    "get_device", "data_ptr", "result_type", "has_names", "untyped_storage", "is_tensor", "__len__", "__hash__",
    "__dir__", "__deepcopy__", "__reduce_ex__", "_is_view", "is_conj", "is_neg",
}  # fmt: skip
# Methods that stand for Python's operators; those of the right side get their arguments exchanged.
OPERATORS: dict[str, TorchFunction] = {
    f"__{name}__": getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "pow", "matmul", "neg", "iadd", "isub", "imul", "itruediv", "ipow")
} | {"__getitem__": operator.getitem, "__setitem__": operator.setitem}
REVERSED: dict[str, TorchFunction] = {
    f"__r{name}__": getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "pow", "matmul", "floordiv", "mod")
} | {"__rdiv__": operator.truediv}


class Recorder(TorchFunctionMode):
    """Writes down, as a graph of torch.fx, what a module calls while it runs.

    A tensor is known by its identity: a function's result, an input, one that the module holds, or (what nobody saw
    made) a constant.
    """

    def __init__(self, module: nn.Module, originals: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.graph, self.tracer = fx.Graph(), Tracer(single=False)
        self.constants: dict[str, Tensor] = {}
        self.questions: list[fx.Node] = []
        self._layer = ""  # the module that was entered last, as messages call it
        self._inside = False  # within a function or layer that is one node already
        self._originals = originals
        self._names = {id(m): name for name, m in module.named_modules()}
        held = (*module.named_parameters(), *module.named_buffers())
        self._held = {id(v): name for name, v in held}
        # Weakly, or all activations of a batch would be held at once.
        self._nodes: dict[int, tuple[weakref.ref[Tensor], fx.Node]] = {}

    # What the module begins and ends with

    def begin(self, arguments: Mapping[str, object]) -> None:
        """The module's arguments, by name: a placeholder for each."""
        for name, value in arguments.items():
            self._note(value, self._node("placeholder", name, ()))

    def finish(self, value: object) -> fx.Graph:
        """The graph, with what the module returned; without nodes that nothing is made of."""
        self.graph.output(self._mapped(value))
        modules = dict(self._originals)
        for node in reversed(list(self.graph.nodes)):
            # A question stays: its answer may have decided what forward() did next.
            used = node.users or node.op in ("placeholder", "output") or node in self.questions
            if not used and changed_node(node, modules) is None:
                self.graph.erase_node(node)
        return self.graph

    # What is called in between

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if self._inside or threading.get_ident() != self.tracer.thread or _transformed((args, kwargs)):
            plain: object = func(*args, **kwargs)
            return plain
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            parts = self._record(Tensor.unbind, args, {})
            assert isinstance(parts, tuple)
            return iter(parts)
        if name == "__set__":
            return self._set(func, args)
        if name in FORM or (name == "__get__" and not isinstance(func(*args), Tensor)):
            form: object = func(*args, **kwargs)
            return form
        return self._record(*_without_empty(func, args, kwargs))

    def call(self, m: nn.Module, original: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """A module's call: torch's own layers are one node, others are gone into."""
        if self._inside or threading.get_ident() != self.tracer.thread or _transformed((args, kwargs)):
            return original(m, *args, **kwargs)
        name = self._names.get(id(m))
        if name is None:
            # Made in forward(), or kept elsewhere: without tensors of its own it is what it calls.
            if not (*m.parameters(), *m.buffers()):
                check_module(m, "")
                return original(m, *args, **kwargs)
            raise UnsupportedModule(
                f"{type(m).__name__} at {_here()}: is called in forward(), but is no part of the module. Register its "
                "modules: as attributes, or in nn.ModuleList."
            )
        # The user's module, not the copy that runs: that is what will be read.
        known = self._originals[name]
        self.tracer.check(name, known)
        self.tracer.check(name, m)  # forward() may have put other weights into it
        self.tracer.met[name] = known
        self._layer = f"layer {name} ({type(m).__name__})" if name else ""
        if not self.tracer.is_leaf_module(m, name):
            return original(m, *args, **kwargs)
        node = self._node("call_module", name, self._mapped(args), self._mapped(kwargs))
        value = self._run(partial(original, m), args, kwargs)
        self._note(value, node)
        return value

    def _record(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """A function or method as a node, and its value."""
        # Before it runs, for it may change them.
        given, options = self._mapped(args), self._mapped(kwargs)
        value = self._run(func, args, kwargs)
        if not _holds(value) and not _holds((args, kwargs)):
            return value  # torch.is_grad_enabled(): nothing of tensors
        op, target, given = _spelled(func, given)
        node = self._node(op, target, given, options)
        if _holds(value):
            self._note(value, node)
        elif changed_node(node, {}) is None:
            self.questions.append(node)
        return value

    def _run(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """A function's value; what it calls itself is no node."""
        self._inside = True
        try:
            value: object = func(*args, **kwargs)
            return value
        finally:
            self._inside = False

    def ask(self, question: Callable[[], bool]) -> bool:
        """The answer to a question that is no part of the graph; no within what is one node, or of other threads."""
        if self._inside or threading.get_ident() != self.tracer.thread:
            return False
        return bool(self._run(question, (), {}))

    def _set(self, func: TorchFunction, args: Args) -> object:
        """x.requires_grad = … says nothing of numbers; x.data = … changes them under everything made of x."""
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute == "data":
            raise UnsupportedModule(
                f".data at {_here()}: is assigned in forward(), which no graph shows. Use the form that makes a new "
                "tensor (x = x + y)."
            )
        return self._run(func, args, {})

    def place(self) -> str:
        """Where the module stopped, if it did: in which of its parts."""
        return f" in {self._layer}" if self._layer else ""

    # Tensors and their nodes

    def _node(self, op: str, target: object, args: Args, kwargs: Kwargs | None = None) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs or {})  # type: ignore[arg-type]
        # As `Tracer.create_node` notes them.
        node.meta["cut"], node.meta["line"] = not torch.is_grad_enabled(), users_line()
        return node

    def _note(self, value: object, node: fx.Node) -> None:
        """A node's value; of tuples and dicts each tensor gets a node of its own."""
        if isinstance(value, Tensor):
            self._nodes[id(value)] = (weakref.ref(value), node)
            return
        for key, v in entries(value):
            if _holds(v):
                self._note(v, self._node("call_function", operator.getitem, (node, key)))

    def _mapped(self, value: object) -> Any:
        """A value with nodes in the place of tensors."""
        return _replaced(value, self._of)

    def _of(self, v: Tensor) -> fx.Node:
        """The node of a tensor."""
        found = self._nodes.get(id(v))
        if found is not None and found[0]() is v:
            return found[1]
        name = self._held.get(id(v))
        if name is None:
            name = self._constant(v)
        node = self._node("get_attr", name, ())
        self._note(v, node)
        return node

    def _constant(self, v: Tensor) -> str:
        """What nobody saw made: a tensor from outside, or a known one that NumPy or vmap gave."""
        if v.requires_grad:
            made = "made by something that torch does not show (TorchScript, vmap, an extension)"
            what = "a parameter from outside of the module" if v.is_leaf else made
            raise UnsupportedModule(
                f"a tensor of shape {tuple(v.shape)} at {_here()}: is {what}, so its law cannot be told. Make it an "
                "nn.Parameter of the module, and compute with it in forward() by torch's own functions."
            )
        name = f"_recorded_{len(self.constants)}"
        self.constants[name] = v.detach().clone()
        return name


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """Within it, calls of modules go through the recorder, and libraries take the way that they have for graphs."""
    call, compiling = nn.Module.__call__, torch.compiler.is_compiling

    def record(m: nn.Module, /, *args: object, **kwargs: object) -> object:
        """nn.Module.__call__, seen."""
        return recorder.call(m, call, args, kwargs)

    def is_compiling() -> bool:
        """Whether a graph is being made: libraries then do not look whether a mask hides anything."""
        return threading.get_ident() == recorder.tracer.thread or compiling()

    nn.Module.__call__ = record  # type: ignore[method-assign]
    torch.compiler.is_compiling = is_compiling
    try:
        with functions_followed(recorder.ask), recorder:
            yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.compiler.is_compiling = compiling


def plain_outputs(value: object) -> object:
    """What a module returned, as tuples and dicts of tensors: objects with fields by their names, caches left out."""
    if is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: plain_outputs(v) for k, v in value.items() if v is not None}
    if isinstance(value, (tuple, list)):
        return tuple(plain_outputs(v) for v in value)
    return value if value is None or isinstance(value, (Tensor, str, int, float)) else type(value).__name__


def _spelled(func: TorchFunction, args: Args) -> tuple[str, object, Args]:
    """How a graph says it: op, target, arguments."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return "call_function", getattr, (*args, getattr(func, "__self__", func).__name__)
    # Tensor.unflatten is one, though torch does not list it.
    if not is_tensor_method_or_property(func) and getattr(Tensor, name, None) is not func:
        return "call_function", func, args
    if name in REVERSED:
        return "call_function", REVERSED[name], args[::-1]
    if name in OPERATORS:
        return "call_function", OPERATORS[name], args
    return "call_method", name, args


def _without_empty(func: TorchFunction, args: Args, kwargs: Kwargs) -> tuple[TorchFunction, Args, Kwargs]:
    """torch.cat passes over tensors of shape [0], with which caches begin; of one that is left it is a copy."""
    parts = args[0] if args else kwargs.get("tensors")
    if func not in (torch.cat, torch.concat, torch.concatenate) or not isinstance(parts, (tuple, list)):
        return func, args, kwargs
    left = [v for v in parts if tuple(v.shape) != (0,)]
    if len(left) == 1:
        return Tensor.clone, (left[0],), {}
    rest = {k: v for k, v in kwargs.items() if k != "tensors"}
    return (func, (left or parts, *args[1:]), rest)


def _replaced(value: object, change: Callable[[Tensor], object]) -> Any:
    """A value with its tensors changed, in tuples, lists, dicts and slices."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {k: _replaced(v, change) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(_replaced(v, change) for v in value)
    if isinstance(value, slice):
        return slice(*(_replaced(v, change) for v in (value.start, value.stop, value.step)))
    return value


def _tensors(value: object) -> list[Tensor]:
    """All tensors within a value."""
    found: list[Tensor] = []
    _replaced(value, found.append)
    return found


def _holds(value: object) -> bool:
    return bool(_tensors(value))


def _transformed(value: object) -> bool:
    """Whether any is one of torch.func's wrapped tensors, which stand for others."""
    return any(torch._C._functorch.is_functorch_wrapped_tensor(v) for v in _tensors(value))


def _here() -> str:
    """The user's line that is running."""
    return shown_line(users_line()) or "an unknown line"
