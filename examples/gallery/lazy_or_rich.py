# %% [markdown]
# # Lazy or rich: one network, targets of three sizes
# Small targets are reached while the kernel stays (lazy), large ones only by learning another kernel (rich).
# What moves is recorded by `Monitor`, and `verdict()` says which it was. To multiply targets by s is to divide the
# network's outputs by s, which is how Chizat et al. 2019 make any network lazy.

# %%
from functools import partial

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import tangency as tg

torch.manual_seed(0)
x = F.normalize(torch.randn(60, 8)) * 8**0.5
y = torch.tanh(2 * x[:, :1] * x[:, 1:2])

# %%
runs = {}
for size in (0.1, 4.0, 20.0):
    net = tg.models.initialized(lambda: tg.models.mlp([8, 256, 1], parametrization="ntk"), seed=0)
    last = [m for m in net.modules() if hasattr(m, "weight")][-1]
    nn.init.zeros_(last.weight), nn.init.zeros_(last.bias)  # so that all start at f = 0
    k = tg.trace_ntk(net)
    lr = tg.dynamics.max_learning_rate(k(x), curvature=2 / len(x)) / 4
    monitor = tg.dynamics.Monitor(k, x, y=size * y, loss=F.mse_loss)
    options = {"loss": F.mse_loss, "optimizer": partial(torch.optim.SGD, lr=lr), "steps": 400, "every": 20}
    tg.dynamics.train(net, x, size * y, watch=monitor, progress=False, **options)
    runs[size] = monitor.history()
    print(f"targets × {size:g}: {runs[size].verdict()}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.9), layout="constrained")
for (size, run), colour in zip(runs.items(), ("#0072B2", "#009E73", "#D55E00"), strict=True):
    label = f"targets × {size:g}: {run.verdict().kind}"
    left.loglog(run["loss"] / size**2, run["change"], ".-", color=colour, label=label)
    right.plot(run.steps, run["rotation"], color=colour, lw=2)
left.axhspan(1e-6, 0.1, color="#0072B2", alpha=0.08)
left.axhspan(0.5, 10, color="#D55E00", alpha=0.08)
left.invert_xaxis()  # training goes to the right
left.set(xlabel="loss / size²", ylabel="‖Θ − Θ₀‖ / ‖Θ₀‖", title="How far the kernel went", ylim=(1e-6, 10))
right.set(xlabel="step", ylabel="degrees", title="How far its top eigenspace turned")
left.legend()
plt.show()
