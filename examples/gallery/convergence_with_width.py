# %% [markdown]
# # Finite networks come to their limit as m^-½
# The tangent kernel of a random network differs from that of infinite width by about one over the root of its width.
# Each dot is one random network; the lines have slope −½.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import tangency as tg

torch.manual_seed(0)
widths = [16, 32, 64, 128, 256, 512]
make = lambda m: nn.Sequential(nn.Linear(5, m), nn.ReLU(), nn.Linear(m, m), nn.ReLU(), nn.Linear(m, 1))  # noqa: E731
study = tg.studies.convergence(make, widths, torch.randn(10, 5), seeds=12, progress=False)
print(study.table())

# %%
figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
for values, name, colour, shift in (
    (study.ntk, "tangent kernel", "#0072B2", 0.96),
    (study.nngp, "covariance (NNGP)", "#D55E00", 1.04),
):
    for m, errors in zip(widths, values, strict=True):
        ax.loglog([shift * m] * len(errors), errors, "o", ms=4, color=colour, alpha=0.35, mew=0)
    typical = values.square().mean(1).sqrt()
    slope = study.slopes["ntk" if "tangent" in name else "nngp"]
    ax.loglog(widths, typical, "o-", color=colour, ms=6, label=f"{name}: slope {slope}")
guide = 3 * torch.tensor(widths).double() ** -0.5
ax.loglog(widths, guide, color="gray", ls=":", label="m^-½")
ax.set_xticks(widths, [str(m) for m in widths])
ax.minorticks_off()
ax.set(xlabel="width m", ylabel="relative distance from infinite width", title="Random networks and their limit")
ax.legend()
plt.show()
