"""Switches of torch that decide how numbers are computed, set while something runs: tf32, autocast, compiling."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_SWITCHES = RLock()  # tf32 and cuDNN are switched for the whole process, so by one thread at a time


@contextmanager
def numerical_modes(
    device: torch.device, *, tf32: bool = False, differentiable: bool = False, without_cudnn: bool = False
) -> Iterator[None]:
    """Products in float32, or tf32 if asked; the caller's autocast and the compiling of compiled parts are off.

    `differentiable`: what is computed has second derivatives.
    """
    # On a CPU there is nothing to switch, and no lock to wait for.
    cuda = device.type == "cuda"
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = None
    with ExitStack() as stack:
        if cuda:
            stack.enter_context(_SWITCHES)
        if differentiable:
            # The fused attention kernels have no second derivatives.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if cuda and without_cudnn:
            stack.enter_context(cudnn.flags(enabled=False))
        for kind in {device.type, "cpu"}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        # Something may be compiled; importing dynamo only to turn it off would take seconds.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            if cuda:
                before = (matmul.allow_tf32, cudnn.allow_tf32)
                matmul.allow_tf32 = cudnn.allow_tf32 = tf32
            yield
        finally:
            if before is not None:
                matmul.allow_tf32, cudnn.allow_tf32 = before
