# %% [markdown]
# # What to label next: looking ahead beats guessing
# A kernel machine says exactly what any further label would change, so the digits that teach most are asked for first.
# Sixteen labels to begin with, then sixteen more in each round; the network of infinite width is the learner.

# %%
import matplotlib.pyplot as plt

import tangency as tg

pool, test = tg.datasets.digits()
pool = pool.take(600, seed=0)
flat = pool.with_x(pool.x.flatten(1))
kernel = tg.infinite_ntk(tg.models.mlp([64, 16, 10]))

# %%
found = tg.active.compare(
    ["lookahead", "badge", "margin", "random"],
    flat,
    test.with_x(test.x.flatten(1)),
    kernel,
    start=16,
    batch=16,
    rounds=6,
    seeds=3,
    progress=False,
)
print(found.table())

# %% [markdown]
# Left: the mean over three starts. Right: what one start's machine asks for first, in this order: each would change
# most of all that is left, once those before it are learned.

# %%
campaign = tg.active.Campaign(flat.x, 10)
first = campaign.ask(16, strategy="random")
campaign.tell(first, flat.y[first])
wanted = campaign.ask(18, kernel=kernel)

figure = plt.figure(figsize=(10, 3.9), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=(1, 1.1))
ax = left.subplots()
for name, curve in zip(found.names, found.accuracy.mean(1), strict=True):
    ax.plot(found.labels, 100 * curve, "o-", ms=4, label=name, color="#777777" if name == "random" else None)
ax.set(xlabel="labels", ylabel="test accuracy %", title="Accuracy by labels")
ax.legend()
for ax, i in zip(right.subplots(3, 6).flat, wanted.tolist(), strict=True):
    ax.imshow(pool.x[i, 0], cmap="gray_r")
    ax.set(xticks=[], yticks=[])
right.suptitle("asked for first")
plt.show()
