"""A model as it was before tangency saw it, and what has changed since."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_SIMPLE = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


class Snapshot:
    """Parameters, buffers, flags, hooks, attributes, and whether copies and pickles work."""

    def __init__(self, model: nn.Module) -> None:
        marked = next(p for p in model.parameters() if p.requires_grad)
        marked.grad = torch.full_like(marked, 0.5)  # a gradient that is not ours
        self.parameters = {name: (id(p), p.requires_grad, _copy(p.grad)) for name, p in _parameters(model)}
        self.buffers = {name: (id(b), _copy(b)) for name, b in model.named_buffers(remove_duplicate=False)}
        self.modules = {name: _facts(m) for name, m in model.named_modules(remove_duplicate=False)}
        self.state = {name: _copy(v) for name, v in model.state_dict().items()}
        self.copied, self.pickled = _works(copy.deepcopy, model), _works(_pickle, model)

    def changes(self, model: nn.Module) -> list[str]:
        """In words; none if the model is as it was."""
        found = list(_compare("parameter", self.parameters, _now_parameters(model)))
        found += _compare("buffer", self.buffers, _now_buffers(model))
        now = {name: _facts(m) for name, m in model.named_modules(remove_duplicate=False)}
        for name in self.modules.keys() | now.keys():
            was, is_now = self.modules.get(name, {}), now.get(name, {})
            found += _compare(f"attribute of {name or 'the model'}:", was, is_now)
        found += _compare("state", self.state, dict(model.state_dict()))
        if self.copied and not _works(copy.deepcopy, model):
            found.append("deepcopy no longer works")
        if self.pickled and not _works(_pickle, model):
            found.append("pickling no longer works")
        return found


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _now_parameters(model: nn.Module) -> dict[str, Any]:
    return {name: (id(p), p.requires_grad, p.grad) for name, p in _parameters(model)}


def _now_buffers(model: nn.Module) -> dict[str, Any]:
    return {name: (id(b), b) for name, b in model.named_buffers(remove_duplicate=False)}


def _facts(module: nn.Module) -> dict[str, Any]:
    """What a module's __dict__ says: names, simple values, tensors, how many hooks."""
    facts: dict[str, Any] = {"()": tuple(sorted(module.__dict__)), "training": module.training}
    for name, value in module.__dict__.items():
        if name in _HOOKS:
            facts[name] = tuple(value)
        elif isinstance(value, _SIMPLE):
            facts[name] = value
        elif isinstance(value, Tensor):
            facts[name] = _copy(value)
        elif isinstance(value, dict | list | tuple | set) and not name.startswith("_"):
            facts[name] = len(value)
    return facts


def _compare(kind: str, was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = [name for name in was.keys() | now.keys() if not _same(was.get(name), now.get(name))]
    return [f"{kind} {name}" for name in sorted(names)]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and a.requires_grad == b.requires_grad
        return same and torch.equal(a.nan_to_num(), b.nan_to_num())
    return type(a) is type(b) and a == b


def _copy(value: Any) -> Any:
    """A tensor's values and flag, kept apart from it."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _works(f: Callable[[Any], Any], model: nn.Module) -> bool:
    try:
        f(model)
    except Exception:
        return False
    return True


def _pickle(model: nn.Module) -> None:
    pickle.dump(model, io.BytesIO())
