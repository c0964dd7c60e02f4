"""Whether two computations agree up to rounding, and what the model's outputs must be like."""

import torch
from torch import Tensor

from ..errors import ModelError, NonFiniteError

# How far two runs of the same arithmetic may be apart, relative to the largest entry: rounding, not error.
SAME_RUN = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
# How far a rule's gradient may be from autograd's, relative to its norm, before it counts as not fitting.
FITS = {torch.float64: 1e-8, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


def close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors agree up to rounding, in a computation whose fewest bits are those of `dtype`."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = max(float(b.abs().max()), 1e-30) if b.numel() else 1.0
    bound = max(SAME_RUN.get(a.dtype, 2e-4), SAME_RUN.get(dtype, 2e-4))
    return bool(((a - b).abs().nan_to_num(0.0) <= bound * scale).all())


def check_outputs(out: Tensor) -> None:
    """Refuse outputs [n, c] that are not finite."""
    good = out.detach().isfinite().all(1)
    if not bool(good.all()):
        sample = int((~good).nonzero()[0])
        raise NonFiniteError(
            f"the model's output for sample {sample} is not finite. Check that input and the parameters "
            "(torch.isfinite), or use a wider dtype.",
            sample,
            "output",
        )


def check_independent(together: Tensor, alone: Tensor, dtype: torch.dtype) -> None:
    """Refuse a model whose output for a sample is another one in company than alone."""
    if not close(together, alone, dtype):
        gap = float((together - alone).abs().max())
        raise ModelError(
            f"a sample's output depends on the other samples of the batch (it differs by {gap:.2g} together and "
            "alone), so no kernel of pairs exists. Remove what mixes them (batch statistics, softmax or sorting over "
            "the batch dimension, experts with a capacity), or call model.eval()."
        )
