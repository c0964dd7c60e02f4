# %% [markdown]
# # A network and its kernel machine
# The surrogate made of a trained network's tangent kernel draws nearly the same decision surface as the network itself.
# Two moons, a small network, and the kernel machine that is fitted to the same labels.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_moons

import tangency as tg

points, labels = make_moons(200, noise=0.18, random_state=0)
x, y = torch.tensor(points).float(), torch.tensor(labels)
net = tg.models.initialized(lambda: tg.models.mlp([2, 64, 64, 2], torch.nn.Tanh), seed=0)
tg.models.fit(net, x, y, epochs=150, lr=1e-2, batch=50, optimizer="adam", progress=False)

# %%
k = tg.cosine(tg.trace_ntk(net))
fit = tg.surrogate.fit(k(x), y)
across, up = np.meshgrid(np.linspace(-1.6, 2.6, 70), np.linspace(-1.2, 1.7, 55))
grid = torch.tensor(np.stack([across.ravel(), up.ravel()], 1)).float()
network = tg.models.outputs(net, grid).softmax(1)[:, 1]
machine = fit.probabilities(k(grid, x))[:, 1]
same = ((network > 0.5) == (machine > 0.5)).double().mean()
tau = tg.surrogate.kendall(network.double(), machine.double())
print(f"the same class on {same:.1%} of the plane; Kendall's τ of the probabilities {tau:.3f}")

# %% [markdown]
# The dashed line is the network's boundary, in both panels.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
for ax, value, name in zip(axes, (network, machine), ("network", "kernel machine"), strict=True):
    shown = ax.contourf(across, up, value.reshape(across.shape), np.linspace(0, 1, 21), cmap="RdBu_r", alpha=0.9)
    ax.contour(across, up, network.reshape(across.shape), [0.5], colors="black", linestyles="--", linewidths=1.2)
    ax.scatter(*points.T, c=labels, cmap="RdBu_r", edgecolors="white", s=26, linewidths=0.7)
    ax.set(title=name, xlabel="x₁")
    ax.grid(False)
axes[0].set_ylabel("x₂")
figure.colorbar(shown, ax=axes, label="probability of the second class", ticks=[0, 0.5, 1])
plt.show()
