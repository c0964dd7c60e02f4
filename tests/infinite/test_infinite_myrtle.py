"""Kernels of the reference stacks of convolutions, `tg.models.myrtle` and `conv_stack`, against neural-tangents.

The numbers are neural-tangents 0.6.5's in float64, of stax.serial with the same counts of Conv(8, (3, 3),
padding="SAME", W_std=√2, b_std=None) and Relu, AvgPool((2, 2), strides=(2, 2)), GlobalAvgPool, Dense(1, W_std=√2,
b_std=None).
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.errors import InputError

# (0, 0), (0, 1) and (1, 1) of the NNGP and of the NTK.
THEIRS = {
    "myrtle 5": (0.07229957882071643, 0.06980295589149538, 0.07204611029294503,
                 0.17214598715683688, 0.14779851140834271, 0.1794533396984336),
    "myrtle 7": (0.02203745434318962, 0.021225924356107054, 0.02145976079235794,
                 0.06572425249506682, 0.052562674095352785, 0.06626271123556085),
    "myrtle 10": (0.007509335999410805, 0.007303900363656606, 0.00731387986613518,
                  0.02804381833760941, 0.0217284056431245, 0.027873784628241263),
    "stack 11": (0.21004326549302033, 0.2089091630981548, 0.20943977237404204,
                 0.663470323944228, 0.6177407267153485, 0.6689960453915409),
}  # fmt: skip


def network(name: str) -> nn.Module:
    kind, depth = name.split()
    return (tg.models.myrtle if kind == "myrtle" else tg.models.conv_stack)(int(depth), width=4)


def pictures() -> Tensor:
    """Two images, the same on every machine."""
    return torch.from_numpy(np.sin(np.arange(2 * 3 * 8 * 8, dtype=np.float64) ** 1.1).reshape(2, 3, 8, 8))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", THEIRS)
def test_agrees_with_neural_tangents(name: str, dtype: str) -> None:
    both = tg.infinite_ntk(network(name), w_var=2.0, dtype=dtype).both(pictures())
    ours = torch.cat([k[[0, 0, 1], [0, 1, 1]].double() for k in both])
    theirs = torch.tensor(THEIRS[name], dtype=torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype == "float32" else 1e-9, atol=0)


def test_layers() -> None:
    """As many convolutions as the name says less the linear layer, with pooling where the authors have it."""
    kinds = {nn.Conv2d: "c", nn.AvgPool2d: "p", nn.AdaptiveAvgPool2d: "g", nn.Linear: "l"}
    for depth, want in ((5, "ccpcpcgl"), (7, "ccpccpccgl"), (10, "cccpcccpcccgl")):
        net = tg.models.myrtle(depth, 3, 1, width=2)
        assert "".join(kinds.get(type(m), "") for m in net) == want
        assert not any(name.endswith("bias") for name, _ in net.named_parameters())
        assert net(torch.randn(2, 1, 32, 32)).shape == (2, 3)
    flat = tg.models.conv_stack(2, 5, 1, 3, size=6)
    assert flat(torch.randn(2, 1, 6, 6)).shape == (2, 5)


def test_depths_that_there_are_not() -> None:
    with pytest.raises(InputError, match=r"depth=6; needed: one of \[5, 7, 10\]"):
        tg.models.myrtle(6)
    with pytest.raises(InputError, match="depth=0"):
        tg.models.conv_stack(0)
