# %% [markdown]
# # How far a kernel moves while the network trains
# Wide networks keep their kernel (lazy training), narrow ones learn new features; `Monitor` says which you have.
# The same data, three widths, each trained at half the largest rate that its kernel allows.

# %%
from functools import partial

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import tangency as tg

torch.manual_seed(0)
x = F.normalize(torch.randn(40, 8)) * 8**0.5
y = torch.tanh(2 * x[:, :1] * x[:, 1:2])

# %%
runs = {}
for width in (32, 256, 2048):
    make = lambda w=width: tg.models.mlp([8, w, 1], parametrization="ntk")  # noqa: E731
    net = tg.models.initialized(make, seed=0)
    k = tg.trace_ntk(net)
    lr = tg.dynamics.max_learning_rate(k(x), curvature=2 / len(x)) / 2
    monitor = tg.dynamics.Monitor(k, x)
    past = tg.dynamics.train(
        net,
        x,
        y,
        loss=F.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=lr),
        steps=300,
        every=10,
        watch=monitor,
        progress=False,
    )
    runs[width] = (monitor.regime(), past)
    print(f"width {width:5d}: loss {past.loss[-1]:.4f}, kernel moved by {float(runs[width][0].change[-1]):.1%}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.9), layout="constrained", sharex=True)
for (width, (regime, past)), colour in zip(runs.items(), ("#D55E00", "#0072B2", "#000000"), strict=True):
    left.plot(regime.steps, 100 * regime.change, color=colour, lw=2, label=f"width {width}")
    right.semilogy(past.steps, past.loss, color=colour, lw=2)
left.set(xlabel="step", ylabel="‖Θ − Θ₀‖ / ‖Θ₀‖, %", title="The kernel")
right.set(xlabel="step", ylabel="loss", title="The loss")
left.legend()
plt.show()
