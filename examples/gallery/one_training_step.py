# %% [markdown]
# # What one training step moves
# A step on one sample moves the answer everywhere, by as much as the tangent kernel says.
# A network that sorts two spirals takes one step on the starred point; colours show how its logit moves.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn import functional as F

import tangency as tg

torch.manual_seed(0)
turn = torch.linspace(0.6, 3.4, 90).repeat(2)
side = torch.arange(180) // 90
angle = 2.2 * turn + torch.pi * side
x = turn[:, None] * torch.stack([angle.cos(), angle.sin()], 1) / 2 + 0.03 * torch.randn(180, 2)
make = lambda: tg.models.mlp([2, 96, 96, 1], torch.nn.Tanh)  # noqa: E731
before = tg.models.initialized(make, seed=2)
trained = tg.models.initialized(make, seed=2)
adam = lambda p: torch.optim.Adam(p, lr=5e-3)  # noqa: E731
loss = F.binary_cross_entropy_with_logits
tg.dynamics.train(trained, x, side[:, None].float(), loss=loss, optimizer=adam, steps=400, every=400, progress=False)
right = ((trained(x)[:, 0] > 0) == side.bool()).double().mean()
print(f"after training {right:.0%} of the points are on the right side")

# %%
line = np.linspace(-2, 2, 90)
across, up = np.meshgrid(line, line)
grid = torch.tensor(np.stack([across.ravel(), up.ravel()], 1)).float()
star = 50
figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.4), layout="constrained", sharey=True)
for ax, net, name in zip(axes, (before, trained), ("before training", "after training"), strict=True):
    everywhere = torch.cat([grid, x[[star]]])
    moved = tg.dynamics.one_step(net, everywhere, x[[star]], torch.ones(1, 1), loss=loss, lr=0.1)[:, 0, 0]
    shares = (moved[:-1] / moved[-1]).reshape(across.shape)
    shown = ax.contourf(across, up, shares, np.linspace(-1, 1, 21), cmap="RdBu_r", extend="both")
    ax.scatter(*x.T, c=["#333333" if s else "white" for s in side], edgecolors="#333333", s=12, linewidths=0.5)
    ax.plot(*x[star], "*", color="#F0E442", ms=20, mec="black")
    ax.set(title=name, xticks=[], yticks=[], aspect="equal")
    ax.grid(False)
figure.colorbar(shown, ax=axes, label="move, relative to the star's own", ticks=[-1, 0, 1])
plt.show()
