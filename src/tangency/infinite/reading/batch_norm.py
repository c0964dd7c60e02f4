"""F.batch_norm, as layers of a class of their own call it (timm's norms with an activation): read as nn.BatchNorm."""

import torch
from torch import Tensor, nn

from .calls import RANDOM, Call, Keywords, Parameter
from .modules import read_module

_CLASSES = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # by the number of axes of positions


def read_batch_norm(call: Call) -> object:
    """The value after the module that has these statistics, scale and shift; the limits are those of nn.BatchNorm."""
    options = call.named("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    value, mean, var = options["input"], options.get("running_mean"), options.get("running_var")
    scale, shift, build = options.get("weight"), options.get("bias"), call.build
    parameters = isinstance(scale, Parameter) and isinstance(shift, Parameter)
    owner = scale.name.removesuffix(".weight") if isinstance(scale, Parameter) else ""
    paired = isinstance(shift, Parameter) and shift.name == f"{owner}.bias".removeprefix(".")
    if not isinstance(value, RANDOM) or not ((scale is None and shift is None) or (parameters and paired)):
        raise build.unsupported(
            "normalises the input, or by a scale and shift that are no parameters of one module.",
            "Use nn.BatchNorm, or freeze its parameters and normalise beforehand.",
        )
    kind = _CLASSES[min(len(value.shape) - 1, 3)]
    module = kind(value.shape[0], float(options.get("eps", 1e-5)), None, parameters, isinstance(mean, Tensor))
    with torch.no_grad():
        if isinstance(mean, Tensor) and isinstance(var, Tensor):
            module.load_state_dict({"running_mean": mean, "running_var": var}, strict=False)
        if isinstance(scale, Parameter) and isinstance(shift, Parameter):
            module.load_state_dict({"weight": scale.value, "bias": shift.value}, strict=False)
    module.train(bool(options.get("training", False)))
    return read_module(module, Call(build, call.weights, (value,), Keywords(), call.label, owner))
