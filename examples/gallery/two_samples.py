# %% [markdown]
# # Do two samples differ, and which images tell?
# Two halves of the digits; in one of them every fifth image was shifted by a pixel. A network trained on other digits
# gives the kernel; the two-sample test says that the halves differ, and its witness which images make it so.

# %%
import matplotlib.pyplot as plt
import torch

import tangency as tg
from tangency.demo import network

train, rest = tg.datasets.digits(test=900)
model = tg.models.initialized(network, seed=0)
tg.models.fit(model, train.x, train.y, epochs=8, lr=3e-3, batch=50, optimizer="adam", progress=False)

order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))
x, y = rest.x[order[:450]], rest.x[order[450:]].clone()
moved = torch.arange(len(y)) % 5 == 0
y[moved] = y[moved].roll(1, dims=3)

# %%
kernel = tg.cosine(tg.pseudo_ntk(model))
found = tg.distributions.mmd(kernel, x, y, progress=False)
told = tg.distributions.classifier_test(kernel, x, y, draws=200, progress=False)
plain = tg.distributions.mmd(tg.gaussian(torch.cat([x, y])), x, y, progress=False)
print(found.sentence(), told.sentence(), f"Gaussian kernel on pixels: p = {plain.p:.2g}", sep="\n")

# %% [markdown]
# Left: the value among those of random halves. Middle: the witness of each image of the second half; where it is low,
# the second half has more images like it. Right: its twelve lowest.

# %%
figure = plt.figure(figsize=(12, 3.6), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=(1.6, 1))
null, witness = left.subplots(1, 2)
null.hist(found.null, 40, color="#999999")
null.axvline(found.value, color="#D55E00", lw=2)
null.set(xlabel="MMD²", ylabel="permutations", title=f"p = {found.p:.2g}")
w = found.witness_y
witness.hist([w[~moved], w[moved]], 40, stacked=True, color=["#0072B2", "#D55E00"], label=["as it was", "shifted"])
witness.set(xlabel="witness", ylabel="images", title="Second half")
witness.legend()
for ax, i in zip(right.subplots(3, 4).flat, found.carriers(12)[1].tolist(), strict=True):
    ax.imshow(y[i, 0], cmap="gray")
    ax.set(xticks=[], yticks=[])
    ax.set_title("shifted" if moved[i] else "as it was", fontsize=8)
plt.show()
