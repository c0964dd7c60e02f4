# %% [markdown]
# # Order, chaos, and the edge between
# In a deep network two inputs grow alike or grow apart, depending on the variances that its weights were drawn with.
# Only near the edge does anything that the inputs say reach the far end: that is where deep networks can be trained.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import tangency as tg
from tangency.infinite import Erf, Linear, Serial

w_vars, b_vars = np.linspace(0.3, 2.2, 30), np.linspace(0.005, 0.4, 18)
depth = np.array([[tg.studies.phase(Erf(), w_var=w, b_var=b).depth for w in w_vars] for b in b_vars])
edge = tg.studies.boundary(Erf(), torch.tensor(b_vars))

# %% [markdown]
# Beside it: how alike two inputs still are after each layer, read off the infinitely wide network.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained", width_ratios=(1.2, 1))
shown = left.pcolormesh(w_vars, b_vars, np.log10(np.minimum(depth, 100)), cmap="cividis", shading="gouraud")
left.plot(edge, b_vars, color="white", lw=2)
left.text(0.5, 0.25, "ordered", color="white")
left.text(1.7, 0.05, "chaotic", color="white")
left.set(xlabel="variance of weights", ylabel="variance of biases", title="How many layers a difference survives")
left.grid(False)
figure.colorbar(shown, ax=left, label="layers", ticks=[0, 1, 2]).ax.set_yticklabels(["1", "10", "100"])

pair = torch.nn.functional.normalize(torch.tensor([[1.0, 0, 0], [0.6, 0.8, 0]], dtype=torch.float64)) * 3**0.5
critical = float(tg.studies.boundary(Erf(), [0.05])[0])
for w, colour in ((0.5, "#0072B2"), (critical, "#000000"), (2.0, "#D55E00")):
    alike = []
    for layers in range(1, 31, 2):
        net = Serial(*[Linear(), Erf()] * layers, Linear())
        alike.append(float(tg.cosine(tg.infinite_nngp(net, w_var=w, b_var=0.05))(pair)[0, 1]))
    right.plot(range(1, 31, 2), alike, "o-", ms=3.5, color=colour, label=f"weights {w:.2f}")
right.set(xlabel="layers", ylabel="cosine of the two inputs", title="Biases 0.05")
right.legend()
plt.show()
