# %% [markdown]
# # Which training images made this decision?
# The logit of a surrogate is a sum over training images, so each one's part in a decision can be read off.
# Here a small CNN reads scikit-learn's digits, and we look into a test image that it gets wrong.

# %%
import matplotlib.pyplot as plt

import tangency as tg
from tangency.demo import network

train, test = tg.datasets.digits()
train = train.take(600)
model = tg.models.initialized(network, seed=0)
tg.models.fit(model, train, epochs=6, lr=3e-3, batch=50, optimizer="adam", progress=False)

# %% [markdown]
# A kernel machine is fitted to the labels that the network was trained on; it follows the network where it errs, too.

# %%
logits = tg.models.outputs(model, test.x)
said = logits.argmax(1)
wrong = said != test.y
k = tg.cosine(tg.trace_ntk(model))
fit = tg.surrogate.fit(k(train.x), train.y)
cross = k(test.x[wrong], train.x)
agree = (fit.logits(cross).argmax(1) == said[wrong]).nonzero()[:, 0]
print(f"{int(wrong.sum())} of {len(test.y)} test images are wrong; on {len(agree)} of these the surrogate errs alike")

# %% [markdown]
# `attributions` are the terms of that sum: here, the images that spoke most for the answer and most against it.

# %%
one = int(agree[0])
z, label, answer = test.x[wrong][one], int(test.y[wrong][one]), int(said[wrong][one])
parts = tg.decisions.attributions(fit, cross[[one]])[0, answer]
helpful, harmful = parts.topk(5).indices, parts.topk(5, largest=False).indices

figure, axes = plt.subplots(2, 6, figsize=(9.5, 3.6), layout="constrained")
for row, (indices, colour, word) in zip(
    axes, ((helpful, "#0072B2", "for"), (harmful, "#D55E00", "against")), strict=True
):
    for ax, i in zip(row[1:], indices.tolist(), strict=True):
        ax.imshow(train.x[i, 0], cmap="gray_r")
        ax.set_title(f"a {int(train.y[i])}: {float(parts[i]):+.2f}", color=colour)
    row[1].set_ylabel(f"{word} a {answer}", color=colour)
axes[0, 0].imshow(z[0], cmap="gray_r")
axes[0, 0].set_title(f"a {label}, taken for a {answer}")
axes[1, 0].set_visible(False)
for ax in axes.flat:
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.grid(False)
plt.show()
