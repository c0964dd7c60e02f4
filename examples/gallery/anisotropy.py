# %% [markdown]
# # Directions that a network finds easy, before it has seen any data
# Two classes that differ along one direction only: an untrained network already knows which directions it will learn.
# They are singular vectors of the derivative of its slope in the inputs by its weights, its anisotropy directions.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import tangency as tg

net = tg.models.initialized(
    lambda: tg.models.lenet5(1, channels=1, size=16, activation=nn.GELU, pool=nn.AvgPool2d, padding=2), seed=0
).eval()
found = tg.studies.anisotropy(net, (1, 16, 16), 256, progress=False)

# %% [markdown]
# For some of them, easy to hard, samples are drawn that only this direction tells apart, x = 2 y u + noise across u,
# and a copy of the network is trained on them.

# %%
indices = [0, 5, 10, 20, 40, 100]
tasks = found.tasks(indices, train=1000, test=1000, epsilon=2.0)
recipe = tg.models.Recipe(epochs=15, batch=32, lr=0.05)
learned = tg.studies.learn(net, tasks, recipe=recipe, linear=False, progress=False)

# %%
figure = plt.figure(figsize=(10.5, 3.6), layout="constrained")
grid = figure.add_gridspec(2, 10)
for k, i in enumerate(indices):
    image = found.directions[i, 0]
    for row, (shown, colours) in enumerate(
        ((image, "RdBu"), (torch.fft.fftshift(torch.fft.fft2(image).abs()), "magma"))
    ):
        axis = figure.add_subplot(grid[row, k])
        axis.imshow(shown, cmap=colours)
        axis.set(xticks=[], yticks=[], title=f"u_{i}" if row == 0 else "")
        axis.set_ylabel(("space", "frequency")[row] if k == 0 else "")
axis = figure.add_subplot(grid[:, 6:])
axis.semilogx([i + 1 for i in indices], [100 * t.accuracy for t in learned.network], "o-", color="#0072B2")
axis.axhline(50, color="gray", lw=0.8, ls=":")
axis.set(xlabel="index + 1", title="Test accuracy along u, %")
plt.show()
