# %% [markdown]
# # What pooling is worth: kernels of three infinite networks
# Convolutions see neighbours, pooling the same thing in another place. Three exact kernels, one learning curve each.
# The digits are put anywhere on a larger field: a dense network has to learn every place by itself.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import tangency as tg

train, test = (part.take(n) for part, n in zip(tg.datasets.digits(), (240, 150), strict=True))
generator = torch.Generator().manual_seed(0)


def moved(x: torch.Tensor) -> torch.Tensor:
    """Each digit somewhere on a field of 12×12."""
    out = torch.zeros(len(x), 1, 12, 12)
    for image, (top, left) in zip(range(len(x)), torch.randint(0, 5, (len(x), 2), generator=generator), strict=True):
        out[image, 0, top : top + 8, left : left + 8] = x[image].view(8, 8)
    return out


x, z = moved(train.x), moved(test.x)
dense = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
kernels = {
    "dense": tg.infinite_ntk(dense),
    "convolutions, flattened": tg.infinite_ntk(tg.models.conv_stack(3, 1, channels=1, size=12)),
    "convolutions, pooled": tg.infinite_ntk(tg.models.conv_stack(3, 1, channels=1)),
}

# %%
sizes = (30, 60, 120, 240)
targets = F.one_hot(train.y, 10).double() - 0.1
figure, ax = plt.subplots(figsize=(6.6, 4.2), layout="constrained")
for (name, k), color in zip(kernels.items(), ("#999999", "#0072B2", "#D55E00"), strict=True):
    K, cross = k(x), k(z, x)
    reg = 1e-3 * float(K.diagonal().mean())
    fits = [tg.regress.ridge(K[:n, :n], targets[:n], reg=reg).predict(cross[:, :n]) for n in sizes]
    right = [100 * float((fit.argmax(1) == test.y).double().mean()) for fit in fits]
    print(f"{name}: " + ", ".join(f"{r:.0f} % with {n}" for r, n in zip(right, sizes, strict=True)))
    ax.plot(sizes, right, "o-", color=color, lw=2, label=name)

# %%
ax.set_xscale("log")
ax.minorticks_off()
ax.set(xticks=sizes, xticklabels=sizes, xlabel="training images", ylabel="test images read right, %", ylim=(0, 100))
ax.set_title("Digits anywhere on the field")
ax.legend()
plt.show()
