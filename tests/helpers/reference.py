"""The slow, obvious oracle: every Jacobian in full, one sample at a time, and the kernels as sums over it.

Run as a script, it checks its two ways to differentiate against each other on the whole zoo.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils._pytree import tree_leaves, tree_map

Jacobians = dict[str, Tensor]  # name -> [n, c, *parameter.shape]
Head = Callable[[Any], Any]

# vmap of jacrev refuses these or, where n happens to equal c, is silently wrong: PReLU's weight gradient in torch 2.13.
NO_VMAP = (nn.PReLU, nn.RNNBase)


def jacobians(model: nn.Module, x: Any, *, head: Head | None = None, names: Iterable[str] | None = None) -> Jacobians:
    """Jacobian of each sample's outputs in each parameter, by `jacobians_vmap` or, where vmap cannot, the loop.

    `names` defaults to the parameters that require gradients. `head` maps what the model returns to the outputs.
    """
    if any(isinstance(module, NO_VMAP) for module in model.modules()):
        return jacobians_loop(model, x, head=head, names=names)
    try:
        return jacobians_vmap(model, x, head=head, names=names)
    except RuntimeError:
        return jacobians_loop(model, x, head=head, names=names)


def jacobians_vmap(
    model: nn.Module, x: Any, *, head: Head | None = None, names: Iterable[str] | None = None
) -> Jacobians:
    """`jacobians` by `torch.func`: vmap over samples of jacrev of the model called on a batch of one."""
    chosen = {name: parameter.detach() for name, parameter in select(model, names).items()}

    def outputs(parameters: dict[str, Tensor], sample: Any) -> Tensor:
        args, kwargs = arguments(tree_map(lambda leaf: leaf.unsqueeze(0), sample))
        return flatten(functional_call(model, parameters, args, kwargs), head)

    result: Jacobians = vmap(jacrev(outputs), in_dims=(None, 0))(chosen, x)
    return {name: jacobian.detach() for name, jacobian in result.items()}


def jacobians_loop(
    model: nn.Module, x: Any, *, head: Head | None = None, names: Iterable[str] | None = None
) -> Jacobians:
    """`jacobians` by one call of the model per sample and one `torch.autograd.grad` per output."""
    chosen = select(model, names)
    rows: dict[str, list[Tensor]] = {name: [] for name in chosen}
    with requiring_grad(chosen.values()):
        for k in range(len(tree_leaves(x)[0])):
            args, kwargs = arguments(tree_map(lambda leaf, k=k: leaf[k : k + 1], x))
            outputs = flatten(model(*args, **kwargs), head)
            grads = [gradient(output, list(chosen.values())) for output in outputs]
            for name, columns in zip(chosen, zip(*grads, strict=True), strict=True):
                rows[name].append(torch.stack(columns))
    return {name: torch.stack(row) for name, row in rows.items()}


def parts(j1: Jacobians, j2: Jacobians) -> dict[str, Tensor]:
    """The kernel of each parameter alone, [n, c, m, d]."""
    return {name: torch.einsum("ncp,mdp->ncmd", matrix(j1[name]), matrix(j2[name])) for name in j1}


def full(j1: Jacobians, j2: Jacobians) -> Tensor:
    """The kernel of all parameters, [n, c, m, d]."""
    return torch.stack(list(parts(j1, j2).values())).sum(0)


def trace(j1: Jacobians, j2: Jacobians) -> Tensor:
    """The sum over outputs c = d of the kernel, [n, m]: no division by their number."""
    return torch.einsum("ncmc->nm", full(j1, j2))


def pseudo(j1: Jacobians, j2: Jacobians) -> Tensor:
    """The kernel of the one output Σ f_c / √c, [n, m]: the pseudo-NTK of Mohamadi, Bae and Sutherland (2023)."""
    kernel = full(j1, j2)
    return kernel.sum((1, 3)) / kernel.shape[1]


def matrix(jacobian: Tensor) -> Tensor:
    """A parameter's Jacobian as [n, c, p], also that of a scalar."""
    return jacobian.reshape(*jacobian.shape[:2], -1)


def select(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The parameters to differentiate in; a shared one has one name, its first."""
    parameters = dict(model.named_parameters())
    if names is None:
        return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    return {name: parameters[name] for name in names}


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments: a dict is keywords, a tuple positions, anything else the only one."""
    if isinstance(x, dict):
        return (), x
    return (x if isinstance(x, tuple) else (x,)), {}


def flatten(output: Any, head: Head | None) -> Tensor:
    """One sample's outputs as a vector [c], out of what the model or its head returns."""
    output = output if head is None else head(output)
    tensor: Tensor = getattr(output, "logits", output)
    return tensor.reshape(-1)


def gradient(output: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    """Gradients of one number, zero in what it does not depend on."""
    if not output.requires_grad:
        return tuple(torch.zeros_like(parameter) for parameter in parameters)
    return torch.autograd.grad(output, parameters, retain_graph=True, materialize_grads=True)


@contextmanager
def requiring_grad(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within it, these parameters require gradients; after it, those that did before."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def difference(j1: Jacobians, j2: Jacobians) -> float:
    """The largest difference of two Jacobians, relative to the largest entry of any parameter."""
    assert j1.keys() == j2.keys()
    scale = max(float(jacobian.abs().max()) for jacobian in j2.values())
    return max(float((j1[name] - j2[name]).abs().max()) for name in j1) / scale


def check() -> None:
    """Print, for each case of the zoo, what both oracles took and by how much they differ."""
    from time import perf_counter

    from zoo import ZOO, build

    torch.set_num_threads(1)
    print(f"{'name':26}{'c':>4}{'p':>7}{'vmap s':>8}{'loop s':>8}  difference")
    for case in ZOO:
        model, x = build(case, n=4)
        start = perf_counter()
        loop = jacobians_loop(model, x)
        middle = perf_counter()
        try:
            verdict = f"{difference(jacobians_vmap(model, x), loop):.1e}"
        except RuntimeError as error:
            verdict = f"vmap cannot: {str(error).splitlines()[0][:90]}"
        end = perf_counter()
        c = next(iter(loop.values())).shape[1]
        p = sum(jacobian[0, 0].numel() for jacobian in loop.values())
        print(f"{case.name:26}{c:4}{p:7}{end - middle:8.2f}{middle - start:8.2f}  {verdict}", flush=True)


if __name__ == "__main__":
    check()
