# %% [markdown]
# # The last layer of a network, fitted again
# The best in the span of a network's last layer is orders of magnitude nearer than what the network itself says.
# Through the features (CKJ) it is nearer still than through the Gram, whose rounding is in the way.

# %%
import matplotlib.pyplot as plt
import torch

import tangency as tg

f = tg.studies.FUNCTIONS["f3"]
net = tg.models.initialized(lambda: tg.models.mlp([1, 64, 64, 64, 1], torch.nn.Tanh), seed=0)
at = [0, 25, 50, 100, 150, 200, 300, 400, 500, 600]
found = tg.studies.conjugate_regression(net, f, epochs=800, at=at, progress=False)

# %% [markdown]
# The network at the end, its last layer fitted again, and the errors of all machines over the training.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.8), layout="constrained")
x = torch.linspace(-1, 1, 601, dtype=torch.float64)[:, None]
nodes = torch.linspace(-1, 1, 201, dtype=torch.float64)[:, None]
kernel = tg.conjugate_kernel(found.network)
fit = tg.regress.least_squares(kernel.features(nodes), f(nodes))
left.plot(x, f(x), color="black", lw=3, alpha=0.25, label="f")
left.plot(x, found.network(x).detach()[:, 0], color="#7f7f7f", lw=1.2, label="network")
left.plot(x, fit.predict(kernel.features(x)), color="#009E73", lw=1.2, label="last layer fitted again")
left.set(title="cos(e^{3x})", xlabel="x", ylim=(-1.5, 2.2))
left.legend(frameon=False, loc="upper left")
for name, colour in {"NN": "#7f7f7f", "NTK": "#D55E00", "CK": "#0072B2", "CKJ": "#009E73"}.items():
    right.semilogy([m.epoch for m in found.moments], [m.test[name] for m in found.moments], "o-", ms=3, color=colour)
    right.annotate(f" {name}", (800, found.last.test[name]), color=colour, va="center")
right.set(title="Test error over the training", xlabel="epoch", xlim=(0, 880))
right.grid(alpha=0.25, lw=0.4)
plt.show()
