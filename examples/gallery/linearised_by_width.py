# %% [markdown]
# # Wide networks train as their linearisations do
# The wider a network, the closer its training stays to that of its first-order Taylor polynomial.
# `tg.linearize(net)` is a module like any other: the same loop trains both.

# %%
import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import tangency as tg

torch.manual_seed(0)
x = torch.linspace(-2, 2, 12)[:, None]
y = torch.sin(2.5 * x)
z = torch.linspace(-2.6, 2.6, 160)[:, None]
sgd = lambda p: torch.optim.SGD(p, lr=0.3)  # noqa: E731

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained", sharey=True)
for ax, width in zip(axes, (8, 64, 512), strict=True):
    make = lambda w=width: tg.models.mlp([1, w, w, 1], torch.nn.Tanh, parametrization="ntk")  # noqa: E731
    net = tg.models.initialized(make, seed=1)
    lin = tg.linearize(net)
    both = [
        tg.dynamics.train(m, x, y, loss=F.mse_loss, optimizer=sgd, steps=200, x_test=z, every=200, progress=False)
        for m in (lin, net)
    ]
    ax.plot(z, both[1].test[0], color="gray", lw=1, ls=":", label="before training")
    ax.plot(z, both[1].test[-1], color="#0072B2", lw=2.4, label="network")
    ax.plot(z, both[0].test[-1], color="#E69F00", lw=1.8, ls="--", label="linearised")
    ax.plot(x, y, "o", color="black", ms=4)
    gap = (both[0].test[-1] - both[1].test[-1]).square().mean().sqrt()
    print(f"width {width:5d}: rms distance of the two {gap:.4f}")
    ax.set(title=f"width {width}: distance {gap:.3f}", xlabel="x")
axes[0].set_ylabel("f(x)")
axes[0].legend(fontsize=8.5)
plt.show()
