"""A user's model run with other tensors in place of its own, and left exactly as it was.

`torch.func.functional_call` swaps by name: a module with two names is restored by the first and then spoilt by the
second. Here every module is visited once, tensors are known by identity, and all that a forward pass leaves behind in
a module (caches, counters, weights made by hooks, a replaced submodule) is taken out again, after errors too.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

TURN = RLock()  # a model, or a part that two models share, is lent to one thread at a time
CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, set})


@dataclass
class Snapshot:
    """What the modules of a model hold: their attributes, and the contents of dicts, lists and sets among them."""

    full: list[tuple[Any, Any]] = field(default_factory=list)  # (container, its contents)
    empty: list[Any] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module) -> "Snapshot":
        found, seen = Snapshot(), set[int]()
        for module in model.modules():
            found._keep(module.__dict__, seen, depth=4)
        return found

    def _keep(self, value: Any, seen: set[int], depth: int) -> None:
        if not value:
            self.empty.append(value)
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        self.full.append((value, value.copy()))
        if depth > 1:
            for inner in value.values() if isinstance(value, dict) else value:
                if type(inner) in CONTAINERS:
                    self._keep(inner, seen, depth - 1)

    def unchanged(self) -> bool:
        return not any(self.empty) and all(_alike(now, before) for now, before in self.full)

    def restore(self) -> None:
        """Put everything back. Done again from the start if Ctrl-C comes in between: it may be repeated."""
        interrupted: KeyboardInterrupt | None = None
        while True:
            try:
                for value in self.empty:
                    if value:
                        value.clear()
                for now, before in self.full:
                    _put_back(now, before)
                break
            except KeyboardInterrupt as e:
                interrupted = e
        if interrupted is not None:
            raise interrupted


def _alike(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return len(now) == len(before) and all(map(is_, now.values(), before.values())) and now.keys() == before.keys()
    if isinstance(now, list):
        return len(now) == len(before) and all(map(is_, now, before))
    return bool(now == before)


def _put_back(now: Any, before: Any) -> None:
    if _alike(now, before):
        return
    if isinstance(now, list):
        now[:] = before
    else:
        now.clear()
        now.update(before)


@contextmanager
def borrowed(model: nn.Module, values: Mapping[str, Tensor], empty: tuple[Any, ...] = ()) -> Iterator[None]:
    """Within it, the model's parameters and buffers are `values`, by name; after it, all is as before.

    `empty` are dicts of the model (caches) that are empty for as long.
    """
    with TURN:
        yield from _swapped(model, values, empty)


def _swapped(model: nn.Module, values: Mapping[str, Tensor], empty: tuple[Any, ...]) -> Iterator[None]:
    own = {id(v): values[k] for k, v in _named(model) if k in values}
    kept = Snapshot.of(model)
    types = [(v, v.dtype, v.detach()) for v in values.values()]
    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, v in table.items():
                    if v is not None and id(v) in own:
                        table[name] = own[id(v)]  # type: ignore[assignment]
        for cache in empty:
            cache.clear()
        yield
    finally:
        kept.restore()
        for v, dtype, data in types:
            if v.dtype != dtype:  # forward() changed the type of a parameter: `layer.to(…)`
                v.data = data


def stand_in(p: Tensor, value: Tensor, needs_grad: bool) -> Tensor:
    """`value` in the place of a parameter: of its class, with its attributes."""
    value = value.detach()
    if not isinstance(p, nn.Parameter):
        return value.requires_grad_(needs_grad)
    try:
        made = torch.Tensor._make_subclass(type(p), value, needs_grad)
        made.__dict__.update(p.__dict__)
    except (TypeError, RuntimeError):  # a class with a constructor of its own
        return value.requires_grad_(needs_grad)
    return made


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def run(model: nn.Module, values: Mapping[str, Tensor], args: Any, kwargs: Any, empty: tuple[Any, ...] = ()) -> Any:
    """model(*args, **kwargs) with `values` as its parameters and buffers."""
    with borrowed(model, values, empty):
        return model(*args, **kwargs)


def attributes(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """(name, table, key, value) of everything that a module holds as a plain attribute."""
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key not in _OWN:
                yield f"{name}.{key}" if name else key, module.__dict__, key, value


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Tensors that are attributes without being parameters or buffers."""
    return ((name, table, key, v) for name, table, key, v in attributes(model) if isinstance(v, Tensor))


def caches(model: nn.Module) -> list[tuple[str, dict[Any, Any]]]:
    """Dicts that hold tensors: where models keep what they computed before."""
    found = []
    for name, _, _, value in attributes(model):
        if isinstance(value, dict) and any(isinstance(v, Tensor) for v in value.values()):
            found.append((name, value))
    return found


def switches(model: nn.Module) -> tuple[Any, ...]:
    """The attributes by which a model may choose its way: modes, flags, numbers and words."""
    return tuple(
        (name, key, value)
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
        if isinstance(value, (bool, int, float, str, type(None)))
    )


def renewed(model: nn.Module) -> set[str]:
    """Weights that forward() itself writes to: embeddings with max_norm."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    written = [m.weight for m in model.modules() if isinstance(m, embeddings) and m.max_norm is not None]
    return {k for k, p in model.named_parameters() if any(p is w for w in written)}


_OWN = frozenset(nn.Module().__dict__)
