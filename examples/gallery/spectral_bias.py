# %% [markdown]
# # Spectral bias: slow waves are learned first
# Gradient flow learns each eigenfunction of the kernel at a speed of its own: the slow part of a signal comes first.
# The whole training is one formula here: `flow.at(times)`.

# %%
import matplotlib.pyplot as plt
import torch

import tangency as tg

angle = torch.linspace(0, 2 * torch.pi, 161, dtype=torch.float64)[:-1]
x = torch.stack([angle.cos(), angle.sin()], 1)
y = angle.sin() + 0.5 * (4 * angle).sin() + 0.35 * (11 * angle).sin()
net = tg.models.mlp([2, 1, 1, 1])  # widths do not matter: they go to infinity
K = tg.infinite_ntk(net, w_var=2.0, b_var=0.1)(x)

# %%
flow = tg.dynamics.flow(K, y, sample_weights=1 / len(x))
times = torch.logspace(-1, 4, 60, dtype=torch.float64)
path = flow.at([1, 10, 100, 1000, *times.tolist()])
waves = {f: (f * angle).sin() / (len(x) / 2) for f in (1, 4, 11)}
print("time to fit each mode:", [f"{float(t):.3g}" for t in flow.time_to_fit()[:6]])

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.9), layout="constrained", width_ratios=(1.3, 1))
left.plot(angle, y, color="black", lw=3, alpha=0.25, label="target")
for k, (time, colour) in enumerate(zip((1, 10, 100, 1000), ("#E69F00", "#56B4E9", "#009E73", "#CC79A7"), strict=True)):
    left.plot(angle, path.train[k], color=colour, lw=1.6, label=f"t = {time}")
left.set(xlabel="angle", title="What the network says during training")
left.legend(ncols=2, fontsize=8.5)
for (f, wave), colour in zip(waves.items(), ("#0072B2", "#D55E00", "#000000"), strict=True):
    right.semilogx(times, (path.train[4:] @ wave) / (y @ wave), color=colour, label=f"frequency {f}")
right.set(xlabel="time", ylabel="part learned", title="Each frequency by itself")
right.legend()
plt.show()
