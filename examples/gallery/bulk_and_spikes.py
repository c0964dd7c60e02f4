# %% [markdown]
# # Bulk, spike, heavy tail: what training leaves in a weight matrix
# The spectrum of the first layer shows what was learned: nothing new, the teacher's one direction, or many directions.
#
# A two-layer network learns a single-index teacher (Wang et al. 2024). Gradient descent leaves the bulk of the random
# weights as it was. Large steps pull one eigenvalue out of it, in the teacher's direction. Adam moves a whole tail.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import tangency as tg

torch.manual_seed(0)
samples, inputs, width = 800, 300, 400
beta = torch.randn(inputs)
x = torch.randn(samples, inputs)
y = torch.nn.functional.softplus(2 * x @ beta / inputs**0.5) - 1 + 0.3 * torch.randn(samples)
RECIPES = {
    "gradient descent": (torch.optim.SGD, 1.0, samples),
    "SGD, large steps": (torch.optim.SGD, 80.0, 80),
    "Adam": (torch.optim.Adam, 0.1, 80),
}


# %%
class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(width, inputs)), nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w.T / inputs**0.5) @ self.v / width**0.5


def train(kind: type, lr: float, batch: int) -> tuple[tg.spectra.Classified, float]:
    torch.manual_seed(1)
    net = TwoLayers()
    before, steps = tg.spectra.weights(net)["w"], kind(net.parameters(), lr=lr)
    for _ in range(25):
        for part in torch.randperm(samples).split(batch):
            steps.zero_grad()
            (net(x[part]) - y[part]).square().mean().backward()
            steps.step()
    return tg.spectra.classify(tg.spectra.weights(net)["w"], before), tg.spectra.weight_alignment(net.w, beta)


# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained", sharey=True)
for axis, (name, recipe) in zip(axes, RECIPES.items(), strict=True):
    found, aligned = train(*recipe)
    bins = torch.linspace(0, 1.1 * float(found.values[0]), 70)
    axis.hist(found.initial, bins, density=True, color="#0072B2", alpha=0.5, label="initial")
    axis.hist(found.values, bins, density=True, histtype="step", color="#D55E00", lw=1.6, label="trained")
    axis.set(title=f"{name}: {found.kind}\n|βᵀu₁| / ‖β‖ = {aligned:.2f}", xlabel="eigenvalue of WᵀW / n", yscale="log")
    print(f"{name}. {found.sentence}")
axes[0].legend()
plt.show()
