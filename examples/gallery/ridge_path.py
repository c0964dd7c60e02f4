# %% [markdown]
# # How much regularisation? The training data know
# Leave-one-out and GCV, from one eigendecomposition, tell the test error of every ridge parameter without test data.
# Here: reading digits by ridge regression with the tangent kernel of an untrained network, one label in eight wrong.

# %%
import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import tangency as tg
from tangency.demo import network

train, test = tg.datasets.digits()
train = train.take(450)
generator = torch.Generator().manual_seed(0)
wrong = torch.rand(len(train.y), generator=generator) < 1 / 8
labels = torch.where(wrong, torch.randint(0, 10, train.y.shape, generator=generator), train.y)
y, truth = F.one_hot(labels, 10).double() - 0.1, F.one_hot(test.y, 10).double() - 0.1

model = tg.models.initialized(network, seed=0).double()
k = tg.trace_ntk(model)
K, cross = k(train.x.double()), k(test.x.double(), train.x.double())

# %%
regs = torch.logspace(-4, 3, 22, dtype=torch.float64) * K.diagonal().mean()
risks = tg.regress.cross_validate(K, y, regs)
fits = [tg.regress.ridge(K, y, reg=float(reg)).predict(cross) for reg in regs]
measured = torch.stack([(f - truth).square().mean() for f in fits])
hits = torch.stack([(f.argmax(1) == test.y).double().mean() for f in fits])
best = risks.best()
print(f"leave-one-out takes reg {best:.3g}: {float(hits[regs == best]):.1%} right; at best {float(hits.max()):.1%}")

# %% [markdown]
# Leave-one-out is judged by labels of which some are wrong, so it lies above the error on clean test images.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.9), layout="constrained")
for values, name, style in (
    (risks.train, "training", "#999999"),
    (risks.loo, "leave-one-out", "#0072B2"),
    (risks.gcv, "GCV", "#E69F00"),
    (measured, "clean test images", "#000000"),
):
    left.loglog(regs, values, color=style, lw=2, ls="--" if name == "GCV" else "-", label=name)
right.semilogx(regs, 100 * hits, color="#000000", lw=2)
right.set(xlabel="reg", ylabel="test images read right, %", title="Accuracy")
left.set(xlabel="reg", ylabel="mean square error", title="Error", ylim=(5e-3, 0.2))
for ax in (left, right):
    ax.axvline(best, color="#0072B2", ls=":", lw=1.5)
left.legend(fontsize=8.5)
plt.show()
