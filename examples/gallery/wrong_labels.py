# %% [markdown]
# # Which labels are wrong? One network knows
# What a network's kernel says of each training image without that image: where all others contradict a label, look.
# One in twenty digits got a wrong label, and the network was trained on them all.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

import tangency as tg
from tangency.demo import network

clean, test = tg.datasets.digits()
draw = torch.Generator().manual_seed(0)
wrong = torch.rand(len(clean), generator=draw) < 0.05
train = replace(
    clean, y=torch.where(wrong, (clean.y + torch.randint(1, 10, clean.y.shape, generator=draw)) % 10, clean.y)
)
model = tg.models.initialized(network, seed=0)
tg.models.fit(model, train.x, train.y, epochs=8, lr=3e-3, batch=50, optimizer="adam", progress=False)

# %%
found = tg.audit(model, train, test, progress=False)
hits = int(wrong[found.suspects.first()].sum())
print(found.words())
print(f"planted: {int(wrong.sum())}; suspected: {found.suspects.count}, of which {hits} were planted")

# %% [markdown]
# Left: margins without the sample, planted ones in colour. Right: the twelve most suspicious images, with the label
# given and the one suggested.

# %%
figure = plt.figure(figsize=(10, 3.9), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=(1, 1.2))
ax = left.subplots()
margin = found.suspects.margin
ax.hist([margin[~wrong], margin[wrong]], 45, stacked=True, color=["#0072B2", "#D55E00"], label=["right", "planted"])
ax.set(yscale="log", xlabel="margin without the image", ylabel="images", title="Do the others agree?")
ax.legend()
for ax, i in zip(right.subplots(2, 6).flat, found.suspects.order[:12].tolist(), strict=True):
    ax.imshow(train.x[i, 0], cmap="gray")
    ax.set(xticks=[], yticks=[])
    ax.set_title(f"“{int(train.y[i])}”\nrather {int(found.suspects.suggested[i])}", fontsize=9)
plt.show()
