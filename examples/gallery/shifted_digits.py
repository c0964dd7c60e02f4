# %% [markdown]
# # Did the data shift? Darker digits, as a network sees them
# Two halves of a test set, one of them darkened and with a little noise. A layer of a trained network tells them apart:
# a test says whether, components and samples say where.

# %%
import matplotlib.pyplot as plt
import torch

import tangency as tg
from tangency.demo import network

train, test = tg.datasets.digits()
model = tg.models.initialized(network, seed=0)
tg.models.fit(model, train.x, train.y, epochs=8, lr=3e-3, batch=50, optimizer="adam", progress=False)
source, other = test.split(0.5)
assert isinstance(other.x, torch.Tensor)
noise = 0.05 * torch.randn(other.x.shape, generator=torch.Generator().manual_seed(0))
target = other.with_x((0.8 * other.x + noise).clamp(0, 1))

# %%
found = tg.shift(model, source, target, names=("as they are", "darker"), progress=False)
print(found.words())

# %% [markdown]
# Left: both sets in the two components that lie farthest apart, with contours of their densities. Right: how far apart
# they are along each component; in colour those that differ by a test, corrected for all of them.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.4), layout="constrained")
pair = sorted(found.components.order[:2].tolist())
for z, name, color in zip((found.z_source, found.z_target), found.names, ("#0072B2", "#D55E00"), strict=True):
    left.scatter(*z[:, pair].T, s=12, color=color, alpha=0.6, lw=0, label=name)
left.set(xlabel=f"component {pair[0] + 1}", ylabel=f"component {pair[1] + 1}", title=f"p = {found.p:.2g}")
left.legend()
first = found.components.order[:12]
colors = ["#D55E00" if p <= found.level else "#999999" for p in found.components.p[first]]
right.barh([f"component {k + 1}" for k in first], found.components.distance[first], color=colors)
right.invert_yaxis()
right.set(xlabel="distance in standard deviations", title="Which components differ")
plt.show()
