"""A model at a point in parameter space, as a plain function from inputs to outputs [n, c]."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._base import checks, tree
from .._base.types import Float, Inputs, Outputs, Params
from ..errors import InputError, ModelError
from . import borrow
from .recorder import Recorder

Head = int | tuple[int, int] | Callable[..., Tensor] | None


@dataclass(frozen=True, eq=False)
class Network:
    """f(params, x) → [n, c]: the model, where its parameters come from, which count, and what is made of its outputs.

    With `params=None` the model's own parameters are read at every call (they may go on training); a state dict that
    was given is copied once and never changes. `caches` are dicts in which the model keeps what it computed in earlier
    calls; the probe finds them, and they are empty while the model runs here.
    """

    model: nn.Module
    params: Params | None
    train: tuple[str, ...]
    outputs: Outputs
    head: Head
    precision: str | None
    caches: list[Any] = field(default_factory=list, repr=False)
    seen: dict[int, Any] = field(default_factory=dict, repr=False)  # weak references to tensors that it keeps elsewhere
    tidy: list[bool] = field(default_factory=list, repr=False)  # whether forward() leaves nothing behind, once examined

    def __getstate__(self) -> dict[str, Any]:
        """What was found out about the model belongs to this process."""
        return self.__dict__ | {"caches": [], "seen": {}, "tidy": []}

    @staticmethod
    def of(
        model: nn.Module,
        *,
        params: Params | None = None,
        train: checks.Train = None,
        outputs: Outputs = None,
        head: Head = None,
        dtype: object = None,
    ) -> "Network":
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
            params = {k.removeprefix(prefix): v for k, v in params.items()}
            checks.state_dict(params, model)
            params = {k: v.detach().clone() for k, v in params.items()}
        train = train.removeprefix(prefix) if isinstance(train, str) else train
        return Network(model, params, checks.trained(model, train), outputs, head, checks.precision(dtype))

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers as this function takes them: detached and cast."""
        given = self.params or {}
        dtype = checks.storage(self.precision)

        def ready(v: Tensor) -> Tensor:
            v = v.detach()
            return v.to(dtype) if dtype is not None and v.is_floating_point() else v

        # An own object per parameter: its identity is how the recorder knows it.
        with borrow.TURN:
            own, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        if gone := [k for k in self.train if k not in own]:
            raise InputError(
                f"the model no longer has the parameter {gone[0]} (tied or replaced since the kernel was made). Make a "
                "new kernel."
            )
        state = {k: ready(given.get(k, p)).detach() for k, p in own.items()}
        renewed = borrow.renewed(self.model)
        state = {k: v.clone() if k in renewed else v for k, v in state.items()}
        if self.channels_last:
            state = {k: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in state.items()}
        state = {k: borrow.stand_in(own[k], v, False) for k, v in state.items()}
        state |= {k: ready(given.get(k, b)) for k, b in buffers.items()}
        return state

    def leaves(self, state: Params, names: Iterable[str]) -> dict[str, Tensor]:
        """What gradients are taken with respect to: the model's own parameters where they can stay in their place.

        Then a parameter counts on whatever road forward() reaches it. Elsewhere (other values, another type, frozen,
        gradient hooks of its own) it is a stand-in.
        """
        own, found = dict(self.model.named_parameters()), {}
        free = self.params is None and self.tidy == [True] and not self.channels_last
        for k in names:
            p = own[k]
            stays = free and p.requires_grad and not p._backward_hooks and not p.is_inference()
            same = state[k].dtype == p.dtype and state[k].data_ptr() == p.data_ptr()
            found[k] = p if stays and same else borrow.stand_in(p, state[k], True)
        return found

    @property
    def channels_last(self) -> bool:
        """The memory order in which 16-bit convolutions are fastest on a GPU."""
        return self.precision == "float16" and next(self.model.parameters()).device.type == "cuda"

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        """x checked and cast."""
        checks.inputs(x, name)
        checks.evaluation_mode(self.model)
        dtype = checks.storage(self.precision)
        x = tree.cast(x, dtype)
        own = [p for p in self.model.parameters() if p.is_floating_point()]
        if dtype is None:
            checks.computable({p.dtype for p in own})
        checks.same_place(x, own[0].device, {dtype} if dtype else {p.dtype for p in own})
        return x

    def __call__(self, state: Params, x: Inputs, watch: Recorder | None = None) -> Float[Tensor, "n c"]:
        """The outputs. forward() gets copies of the buffers, so that what it does to them is forgotten."""
        n, extra = tree.size(x), self._split(x)[1]
        args, kwargs = self.arguments(x)
        buffers = {k for k, _ in self.model.named_buffers()}
        own = {k: v.clone() if k in buffers else v for k, v in state.items()}
        if watch is not None:
            watch.know(own.values())
            watch.replaced({id(p): k for k, p in self.model.named_parameters() if own[k] is not p})
            watch.know(v for _, _, _, v in borrow.plain_tensors(self.model) if not v.requires_grad)
            watch.follow(v for _, v in tree.leaves((args, kwargs)))
        with watch or nullcontext():
            returned = borrow.run(self.model, own, args, kwargs, tuple(self.caches))
            return self._outputs(returned, n, extra)

    @contextmanager
    def at(self, state: Params) -> Iterator[Callable[[Inputs], Tensor]]:
        """The function of x alone, for many calls: a model that leaves nothing behind is borrowed once for all."""
        if self.tidy != [True]:
            yield lambda x: self(state, x)
            return
        with borrow.borrowed(self.model, state):

            def call(x: Inputs) -> Tensor:
                args, kwargs = self.arguments(x)
                return self.outputs_of(self.model(*args, **kwargs), x)

            yield call

    def outputs_of(self, returned: Any, x: Inputs) -> Float[Tensor, "n c"]:
        """What this network makes of what the model returned for x."""
        return self._outputs(returned, tree.size(x), self._split(x)[1])

    def arguments(self, x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with."""
        inputs = self._split(x)[0]
        if self.channels_last:
            inputs = tree.transform(lambda v: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v, inputs)
        return tree.arguments(inputs)

    def _outputs(self, returned: Any, n: int, extra: tuple[Any, ...]) -> Float[Tensor, "n c"]:
        out = pick(returned, self.outputs)
        if out.dim() == 0 and n == 1:
            out = out[None]
        if out.dim() == 0 or out.shape[0] != n:
            raise ModelError(
                f"for {n} samples the model returned a tensor of shape {tuple(out.shape)}; needed: the sample in the "
                "leading dimension. Pass outputs=… to pick or reshape."
            )
        if not out.is_floating_point():
            raise ModelError(f"the model's output is {out.dtype}; needed: a real floating-point tensor.")
        out = self._headed(out, n, extra)
        if out.numel() == 0:
            raise ModelError("the model has no outputs: for each sample it returned an empty tensor.")
        return out.reshape(n, -1)

    def _headed(self, out: Tensor, n: int, extra: tuple[Any, ...]) -> Tensor:
        if self.head is None:
            return out
        flat = out.reshape(n, -1)
        if isinstance(self.head, int):
            return flat[:, _output(self.head, flat)]
        if isinstance(self.head, tuple):
            first, second = self.head
            return flat[:, _output(first, flat)] - flat[:, _output(second, flat)]
        out = self.head(out, *extra)
        if not isinstance(out, Tensor) or out.dim() == 0 or out.shape[0] != n:
            given = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise InputError(
                f"the head returned {given} for {n} samples; needed: [n] or [n, c]. A loss needs reduction='none'."
            )
        return out

    def _split(self, x: Inputs) -> tuple[Inputs, tuple[Any, ...]]:
        """The model's inputs and, for a head of several arguments, the trailing ones that go to the head."""
        extra = head_arity(self.head) - 1
        if extra <= 0:
            return x, ()
        if not isinstance(x, (tuple, list)) or len(x) <= extra:
            raise InputError(
                f"the head takes {extra} more argument(s) than the outputs; needed: inputs as a tuple whose last "
                f"{extra} element(s) are for the head, e.g. k((x, y))."
            )
        return tuple(x[:-extra]), tuple(x[-extra:])

    def without_head(self, x: Inputs) -> tuple["Network", Inputs]:
        """The network whose outputs are those that the head gets, and its inputs."""
        return replace(self, head=None), self._split(x)[0]

    @contextmanager
    def modes(self, *, differentiable: bool = False, exact: bool = False) -> Iterator[None]:
        """The numerical modes that this precision asks for, for as long as the context lasts; none if `exact`.

        The caller's autocast is off (one inside the model is not), and so is the compiling of compiled parts.
        """
        device = next(self.model.parameters()).device.type
        cuda = device == "cuda"
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = None
        with ExitStack() as stack:
            if cuda:
                stack.enter_context(_SWITCHES)
            if differentiable:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if cuda and any(isinstance(m, nn.RNNBase) for m in self.model.modules()):
                # cuDNN's recurrent layers have no backward pass in evaluation mode; torch's own do.
                stack.enter_context(cudnn.flags(enabled=False))
            for kind in {device, "cpu"}:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if "torch._dynamo" in sys.modules:  # something may be compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            try:
                if cuda:
                    before = (matmul.allow_tf32, cudnn.allow_tf32)
                    matmul.allow_tf32 = cudnn.allow_tf32 = self.precision in ("tf32", "float16") and not exact
                yield
            finally:
                if before is not None:
                    matmul.allow_tf32, cudnn.allow_tf32 = before


_SWITCHES = RLock()  # tf32 and cuDNN are switched for the whole process, so by one thread at a time


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


def head_arity(head: Head) -> int:
    """How many positional arguments a head requires."""
    if head is None or isinstance(head, (int, tuple)):
        return 1
    if not callable(head):
        raise InputError(
            f"head={head!r}; needed: an output's number, a pair of them (their difference), or a function of the "
            "outputs."
        )
    try:
        params = inspect.signature(head).parameters.values()
    except (TypeError, ValueError):
        return 1
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in params)


def _output(j: int, out: Tensor) -> int:
    if not -out.shape[1] <= j < out.shape[1]:
        raise InputError(f"head={j}: the model has {out.shape[1]} outputs, numbered from 0.")
    return j


def pick(returned: Any, outputs: Outputs) -> Tensor:
    """The tensor out of what a model returns."""
    if callable(outputs):
        returned = outputs(returned)
    elif outputs is not None:
        try:
            returned = returned[outputs]
        except (KeyError, IndexError, TypeError) as e:
            raise InputError(
                f"outputs={outputs!r} does not pick from what the model returns ({_form(returned)})."
            ) from e
    else:
        returned = only(returned)
    if not isinstance(returned, Tensor):
        raise InputError(
            f"the model returned {_form(returned)}; needed: one tensor. Pick it: outputs='key', outputs=0 or "
            "outputs=lambda r: …"
        )
    return returned


def only(returned: Any) -> Any:
    """The logits of what a model returns, or what it holds if that is one thing alone; else what it returns."""
    if isinstance(returned, Mapping) and isinstance(returned.get("logits"), Tensor):
        return returned["logits"]
    if isinstance(getattr(returned, "logits", None), Tensor):
        return returned.logits
    if isinstance(returned, (Mapping, tuple, list)) and len(returned) == 1:  # (logits,), {"scores": logits}
        return next(iter(returned.values() if isinstance(returned, Mapping) else returned))
    return returned


def _form(returned: Any) -> str:
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} with keys {list(returned)}"
    if isinstance(returned, (tuple, list)):
        return f"a {type(returned).__name__} of {len(returned)}"
    return f"a {type(returned).__name__}"
