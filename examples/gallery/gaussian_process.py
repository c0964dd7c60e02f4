# %% [markdown]
# # What an infinitely wide network believes
# Before training, an infinitely wide network is a Gaussian process; its posterior knows where it has seen no data.
# Left: functions drawn before training. Right: the posterior after nine noisy points, with its 95 % band.

# %%
import matplotlib.pyplot as plt
import torch

import tangency as tg
from tangency.infinite import Erf, Linear, Serial

torch.manual_seed(3)
z = torch.linspace(-4, 4, 201, dtype=torch.float64)[:, None]
x = torch.tensor([-3.1, -2.7, -2.2, -1.6, 0.4, 0.7, 1.1, 1.5, 1.8], dtype=torch.float64)[:, None]
noise = 0.003
y = torch.sin(1.2 * x[:, 0]) + noise**0.5 * torch.randn(9, dtype=torch.float64)
k = tg.infinite_nngp(Serial(Linear(), Erf(), Linear(), Erf(), Linear()), w_var=2.0, b_var=0.5)

# %%
prior = k(z) + 1e-8 * torch.eye(len(z), dtype=torch.float64)
drawn = torch.linalg.cholesky(prior) @ torch.randn(len(z), 5, dtype=torch.float64)
gp = tg.regress.gaussian_process(k(x), y, noise=noise)
after = gp.predict(k(z, x), k(z))
sd = after.covariance.diagonal().clamp_min(0).sqrt()
print(f"log p(y) = {gp.log_likelihood:.2f}; the band is {float(sd.max() / sd.min()):.0f} times wider at its widest")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.8), layout="constrained", sharey=True)
left.plot(z, drawn, lw=1.4)
wide = 2 * k.diag(z).sqrt()
left.fill_between(z[:, 0], -wide, wide, color="gray", alpha=0.15, lw=0)
left.set(title="before training", xlabel="x", ylabel="f(x)")
right.fill_between(z[:, 0], after.mean - 2 * sd, after.mean + 2 * sd, color="#0072B2", alpha=0.18, lw=0, label="95 %")
right.plot(z, after.mean, color="#0072B2", lw=2, label="mean")
right.plot(z, torch.sin(1.2 * z), color="black", lw=1, ls=":", label="truth")
right.plot(x, y, "o", color="#D55E00", ms=5, label="data")
right.set(title="after nine points", xlabel="x")
right.legend(ncols=2, fontsize=8.5)
plt.show()
