# %% [markdown]
# # The last layer, refitted
# A trained network's own features often hold a far better answer than its last layer gives.
#
# A tanh network learns three functions by Adam. Then its last layer alone is put at its optimum, by least squares over
# the network's features: one line, no training. (Qadeer et al. 2023, arXiv:2310.18612.)

# %%
import math

import matplotlib.pyplot as plt
import torch

import tangency as tg

FUNCTIONS = {
    r"$e^{\sin 2\pi x}$": lambda x: torch.exp(torch.sin(2 * math.pi * x)),
    r"$e^{3x}$": lambda x: torch.exp(3 * x),
    r"$\cos e^{3x}$": lambda x: torch.cos(torch.exp(3 * x)),
}
x, z = (torch.linspace(-1, 1, n, dtype=torch.float64)[:, None] for n in (201, 601))

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained", sharey=True)
for axis, (name, f) in zip(axes, FUNCTIONS.items(), strict=True):
    net = tg.models.initialized(lambda: tg.models.mlp([1, 64, 64, 64, 1], activation=torch.nn.Tanh).double(), seed=0)
    tg.models.fit(net, x, f(x), epochs=400, batch=201, lr=1e-3, optimizer="adam", loss="mse", progress=False)
    found = tg.refit_last_layer(net, (x, f(x)), (z, f(z)), progress=False)
    for model, label, color in ((net, "as trained", "#888888"), (found.model, "last layer refitted", "#3b528b")):
        error = (model(z) - f(z)).detach().abs()[:, 0].clamp_min(1e-12)
        axis.semilogy(z[:, 0], error, color=color, lw=1.2, label=label)
    loss = found.test.loss
    axis.set(title=f"{name}: test loss {loss.before:.1g} → {loss.after:.1g}", xlabel="x")
axes[0].set_ylabel("|f(x) − network|")
axes[0].legend(frameon=False)
plt.show()
