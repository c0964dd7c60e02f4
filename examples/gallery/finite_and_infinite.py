# %% [markdown]
# # Attention, recurrence, max pooling: networks and their limit
# Three networks in plain PyTorch, wider and wider: their tangent kernels come to the one that is read off the module.
# Each dot is one random network; `k.limits(x)` says which limit is taken at every layer.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import tangency as tg


class Decoder(nn.Module):
    def __init__(self, m: int) -> None:
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(9, m), nn.Linear(m, 3 * m), nn.Linear(m, 1)
        self.norm, self.mlp = nn.LayerNorm(m), nn.Sequential(nn.Linear(m, m), nn.GELU(), nn.Linear(m, m))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.words(index)
        q, k, v = (h.unflatten(-1, (-1, 8)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))  # heads of 8 channels
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out((x + self.mlp(self.norm(x)))[:, -1])


class Recurrent(nn.Module):
    def __init__(self, m: int) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(9, m), nn.LSTM(m, m, batch_first=True), nn.Linear(m, 1)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(self.words(index))[0][:, -1])


def pooled(m: int) -> nn.Module:
    layers = (nn.Conv2d(3, m, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(m, m, 2), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(m, 1))


# %%
torch.manual_seed(0)
words, images = torch.randint(9, (4, 5)), torch.randn(4, 3, 6, 6)
print(tg.infinite_ntk(Decoder(16)).limits(words))
figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
widths = [16, 32, 64, 128]
for name, make, x in (("decoder", Decoder, words), ("LSTM", Recurrent, words), ("max pooling", pooled, images)):
    study = tg.studies.convergence(make, widths, x, seeds=24, w_var=1.0, b_var=0.1, progress=False)
    (line,) = ax.loglog(widths, study.ntk.square().mean(1).sqrt(), "o-", label=f"{name}: slope {study.slopes['ntk']}")
    ax.loglog(widths, study.ntk, "o", ms=3, color=line.get_color(), alpha=0.3, mew=0)
ax.loglog(widths, 3 * torch.tensor(widths).double() ** -0.5, color="gray", ls=":", label="m^-½")
ax.set_xticks(widths, [str(m) for m in widths])
ax.minorticks_off()
ax.set(xlabel="width m", ylabel="relative distance from infinite width", title="Tangent kernels")
ax.legend()
plt.show()
