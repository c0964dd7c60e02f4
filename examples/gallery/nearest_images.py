# %% [markdown]
# # The nearest training images, through features of a chosen size
# Projected gradients are an embedding: finding what a network learned an answer from is a nearest-neighbour query.
# The neighbours are near for the *network*: they need not look alike, they moved the same parameters.

# %%
import matplotlib.pyplot as plt
import torch

import tangency as tg
from tangency.demo import network

train, test = tg.datasets.digits()
train = train.take(500)
model = tg.models.initialized(network, seed=0)
tg.models.fit(model, train, epochs=5, lr=3e-3, batch=50, optimizer="adam", progress=False)

# %%
k = tg.projected(tg.trace_ntk(model), dim=1024, joint=True)
stored = k.features(train.x)  # [500, 1024]; with store= on disk, for any number of samples
sure = tg.models.outputs(model, test.x).softmax(1).amax(1)
asked = torch.cat([sure.topk(2).indices, sure.topk(3, largest=False).indices])
similarity, who = tg.projection.nearest(k.features(test.x[asked]), stored, neighbours=7)
hits = (train.y[who] == test.y[asked][:, None]).double().mean()
print(f"{k.features(train.x[:1]).shape[1]} numbers a sample; {hits:.0%} of the neighbours shown are of the same class")

# %% [markdown]
# Left: two test images that the network is most sure of, then the three that it is least sure of.

# %%
figure, axes = plt.subplots(5, 8, figsize=(9, 6), layout="constrained")
for row, i, near, alike in zip(axes, asked.tolist(), who.tolist(), similarity.tolist(), strict=True):
    row[0].imshow(test.x[i, 0], cmap="gray_r")
    row[0].set_title(f"a {int(test.y[i])}, {float(sure[i]):.0%} sure", fontsize=9)
    row[0].spines[:].set(color="#0072B2", linewidth=2.5)
    for ax, j, cosine in zip(row[1:], near, alike, strict=True):
        ax.imshow(train.x[j, 0], cmap="gray_r", alpha=0.25 + 0.75 * max(0.0, cosine))
        colour = "black" if train.y[j] == test.y[i] else "#D55E00"
        ax.set_title(f"{int(train.y[j])}: {cosine:.2f}", fontsize=9, color=colour)
for ax in axes.flat:
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(ax in axes[:, 0])
    ax.grid(False)
plt.show()
