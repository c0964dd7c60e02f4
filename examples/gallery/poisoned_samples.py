# %% [markdown]
# # A back door, found by its neighbours
# A tenth of the training images carry a white square and a wrong label; tangent kernels see who taught the trick.
# A test image is flagged if three of its five most similar training images are poisoned.

# %%
import matplotlib.pyplot as plt
import torch

import tangency as tg
from tangency.demo import network

train, test = tg.datasets.digits()
patch = tg.decisions.Patch(size=2, colour=1.0)
bad = tg.decisions.poison(train.x, train.y, patch=patch, target=0, rate=0.1)
attacked = tg.decisions.poison(test.x, test.y, patch=patch, target=0, rate=0.5)
model = tg.models.initialized(network, seed=0)
tg.models.fit(model, bad.x, bad.y, epochs=8, lr=3e-3, batch=50, optimizer="adam", progress=False)
fooled = (tg.models.outputs(model, attacked.x[attacked.mask]).argmax(1) == 0).double().mean()
print(f"images with the square that are taken for a 0: {fooled:.0%}")

# %%
cross = tg.cosine(tg.trace_ntk(model))(attacked.x, bad.x)
found = tg.decisions.detect(cross, bad.mask, attacked.mask, neighbours=5, threshold=3)
print(f"precision {found.precision:.1%}, recall {found.recall:.1%}")

# %% [markdown]
# Below: how many of the five neighbours are poisoned, and three attacked images with theirs (poisoned ones framed).

# %%
figure = plt.figure(figsize=(10, 3.8), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15))
ax = left.subplots()
for shift, mask, name, colour in (
    (-0.2, ~attacked.mask, "clean", "#0072B2"),
    (0.2, attacked.mask, "with the square", "#D55E00"),
):
    ax.bar(torch.arange(6) + shift, torch.bincount(found.votes[mask], minlength=6), 0.4, label=name, color=colour)
ax.axvline(2.5, color="gray", ls=":")
ax.set(xlabel="poisoned among the five nearest", ylabel="test images", title="Votes")
ax.legend(loc="upper center")
for row, i in zip(right.subplots(3, 6), attacked.mask.nonzero()[[0, 40, 90], 0].tolist(), strict=True):
    near = cross[i].topk(5).indices
    for ax, image, name, marked in zip(
        row,
        [attacked.x[i], *bad.x[near]],
        [f"a {int(test.y[i])}", *(f"“{int(y)}”" for y in bad.y[near])],
        [False, *bad.mask[near].tolist()],
        strict=True,
    ):
        ax.imshow(image[0], cmap="gray")
        ax.set(xticks=[], yticks=[])
        ax.set_title(name, fontsize=9)
        ax.grid(False)
        ax.spines[:].set(visible=marked, color="#D55E00", linewidth=3)
plt.show()
