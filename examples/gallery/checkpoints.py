# %% [markdown]
# # A network learns its classes, seen by its kernel
# The kernel at any checkpoint is the same kernel with other parameters: `params=` takes a state dict.
# Samples are sorted by digit; the squares appear as the network learns.

# %%
import copy

import matplotlib.pyplot as plt
import torch

import tangency as tg
from tangency.demo import network

train, test = tg.datasets.digits()
chosen = torch.cat([(test.y == c).nonzero()[:14, 0] for c in range(10)])
x, y = test.x[chosen], test.y[chosen]
model = tg.models.initialized(network, seed=0)
checkpoints = {0: copy.deepcopy(model.state_dict())}
for epoch in range(1, 10):
    tg.models.fit(model, train, epochs=1, lr=2e-3, batch=50, optimizer="adam", seed=epoch, progress=False)
    if epoch in (1, 3, 9):
        checkpoints[epoch] = copy.deepcopy(model.state_dict())

# %%
figure, axes = plt.subplots(1, 4, figsize=(12, 3.7), layout="constrained", sharey=True)
same = y[:, None] == y
for ax, (epoch, params) in zip(axes, checkpoints.items(), strict=True):
    K = tg.cosine(tg.trace_ntk(model, params=params))(x).double()
    model.load_state_dict(params)
    right = tg.models.accuracy(model, test)
    within, between = float(K[same].mean()), float(K[~same].mean())
    shown = ax.imshow(K, cmap="cividis", vmin=0.3, vmax=1, interpolation="nearest")
    ax.set_title(f"epoch {epoch}: {right:.0%} right\nsame class {within:.2f}, others {between:.2f}", fontsize=10)
    ax.set(xticks=range(7, 140, 14), yticks=range(7, 140, 14), xticklabels=range(10), yticklabels=range(10))
    ax.tick_params(length=0)
    ax.grid(False)
    print(f"epoch {epoch:2d}: {right:.1%} right, cosines {within:.2f} within classes, {between:.2f} between")
figure.colorbar(shown, ax=axes, label="cosine of the trace kernel", shrink=0.85)
plt.show()
