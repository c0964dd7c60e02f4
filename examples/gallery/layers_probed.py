# %% [markdown]
# # What each layer of a CNN knows
# Three plain classifiers on the first principal components of every layer. Early, a support vector machine finds in
# many directions what class centres do not have; late, few directions hold the class, and all three nearly agree.

# %%
import matplotlib.pyplot as plt

import tangency as tg
from tangency.demo import network
from tangency.representations import probe

train, test = tg.datasets.digits()
train = train.take(800)
model = tg.models.initialized(network, seed=0)
tg.models.fit(model, train, epochs=20, lr=3e-3, batch=50, optimizer="adam", progress=False)
found = probe(model, train, test, layers=["1", "3", "6", "7"], progress=False)
print(found.table())

# %%
titles = {"1": "convolution 1", "3": "convolution 2", "6": "hidden", "7": "logits"}
kinds = {"neighbours": "nearest neighbours", "centres": "class centres", "svm": "linear SVM"}
figure, axes = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained", sharey=True)
for ax, layer in zip(axes, found.layers, strict=True):
    for (kind, label), colour in zip(kinds.items(), ("#0072B2", "#D55E00", "#009E73"), strict=True):
        ax.plot(layer.dims, 100 * layer.accuracy[kind], "o-", ms=2.5, color=colour, label=label)
        ax.axvline(layer.needed(kind), color=colour, lw=0.8, ls=":")
    ax.set(xscale="log", xlabel="principal components", title=f"{titles[layer.name]}, NC1 {layer.collapse.nc1:.2g}")
axes[0].set_ylabel("test accuracy, % (dotted: 90 % of the best)")
axes[0].legend(loc="lower right", fontsize=8)
plt.show()
