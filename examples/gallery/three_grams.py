# %% [markdown]
# # What three kernels see in the same digits
# The last layer, all layers, and the network of infinite width before it has seen any data, side by side.
# Samples are sorted by class: a network that has learned shows squares along the diagonal.

# %%
import matplotlib.pyplot as plt
import torch

import tangency as tg
from tangency.demo import network

train, test = tg.datasets.digits()
model = tg.models.initialized(network, seed=0)
tg.models.fit(model, train, epochs=6, lr=3e-3, batch=50, optimizer="adam", progress=False)
chosen = torch.cat([(test.y == c).nonzero()[:18, 0] for c in range(10)])
x, y = test.x[chosen], test.y[chosen]

# %%
kernels = {
    "last hidden layer (CK)": tg.conjugate_kernel(model),
    "all layers (NTK)": tg.trace_ntk(model),
    "untrained, infinitely wide": tg.infinite_ntk(network(), w_var=2.0, b_var=0.0),
}
grams = {name: tg.cosine(k)(x).double() for name, k in kernels.items()}
same = y[:, None] == y
for name, K in grams.items():
    off = ~torch.eye(len(y), dtype=torch.bool)
    print(f"{name:28s} same class {K[same & off].mean():.2f}, other classes {K[~same].mean():.2f}")

# %%
figure, axes = plt.subplots(1, 3, figsize=(11.5, 4), layout="constrained", sharey=True)
for ax, (name, K) in zip(axes, grams.items(), strict=True):
    low, high = K.flatten().quantile(torch.tensor([0.02, 0.97], dtype=K.dtype))
    shown = ax.imshow(K, cmap="cividis", vmin=float(low), vmax=float(high), interpolation="nearest")
    ax.set_title(name)
    ax.set(xticks=range(9, 180, 18), yticks=range(9, 180, 18), xticklabels=range(10), yticklabels=range(10))
    ax.tick_params(length=0)
    ax.grid(False)
    figure.colorbar(shown, ax=ax, orientation="horizontal", shrink=0.8, label="cosine")
axes[0].set_ylabel("digit")
plt.show()
