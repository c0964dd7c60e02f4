# %% [markdown]
# # One direction, learned or not
# The same network on the same samples of a teacher that sees its inputs through one direction β. Trained by small steps
# its weights stay random; with a large learning rate one singular value leaves the bulk, and it points along β.

# %%
import matplotlib.pyplot as plt
import torch

import tangency as tg

data = tg.studies.teacher(300, 150, tau=0.2, noise=0.3, seed=0).to(torch.float32)
net = tg.studies.two_layer(150, 225, seed=1, dtype=torch.float32)
runs = {
    "SGD, learning rate 1": tg.studies.Optimizer("sgd", 1.0, batch=16),
    "SGD, learning rate 20": tg.studies.Optimizer("sgd", 20.0, batch=16),
}
learned = {name: tg.studies.train_two_layer(net, data, how, until=1e-3, progress=False) for name, how in runs.items()}
print(f"lazy: R² {tg.studies.lazy(net, data).r2:.2f}")

# %% [markdown]
# Left: eigenvalues of the trained weights, those before training as a line. Right: each neuron's weights along β.

# %%
before = tg.spectra.eigenvalues(net.w.double().T @ net.w.double() / 150)
figure, axes = plt.subplots(2, 2, figsize=(9.5, 5), layout="constrained", sharex="col", width_ratios=(1.3, 1))
for (left, right), (name, run), colour in zip(axes, learned.items(), ("#0072B2", "#D55E00"), strict=True):
    w = run.network.w.double()
    after = tg.spectra.eigenvalues(w.T @ w / 150)
    verdict, found = tg.spectra.classify(after, before), tg.studies.alignments(run.network, data)
    left.hist(after, bins=60, range=(0, 8), color=colour, alpha=0.7)
    left.hist(before, bins=60, range=(0, 8), histtype="step", color="black")
    left.set(title=f"{name}: {verdict.kind}", ylabel="eigenvalues of WᵀW/d", ylim=(0, 20))
    along = w @ data.beta[0].double()
    right.scatter(along, run.network.v, s=8, color=colour)
    right.set(title=f"|βᵀu₁| = {found.feature:.2f}, test R² = {run.r2:.2f}", ylabel="weight of the output, v")
    print(f"{name}: {verdict.sentence}")
axes[1, 1].set_xlabel("wᵀβ of each neuron")
plt.show()
