# %% [markdown]
# # Choose your error: projected kernels
# A random projection to k dimensions keeps every inner product up to about 1/√k, and the error can be known beforehand.
# The prediction counts on large parameters: those with fewer entries than there are dimensions (here the last layer)
# lose nothing, so "sparse" and "hadamard" do better than it says. "kronecker" is the cheapest and errs more.

# %%
import matplotlib.pyplot as plt
import torch

import tangency as tg

_, test = tg.datasets.digits()
pixels = test.x.double().flatten(1)
x = 8 * torch.nn.functional.normalize(pixels[:24] - pixels.mean(0))
model = tg.models.initialized(lambda: tg.models.mlp([64, 200, 1], torch.nn.Tanh), seed=0).double()
exact = tg.trace_ntk(model)
dims = [64, 256, 1024]

# %%
errors = {
    (kind, dim): [tg.projection_error(exact, tg.projected(exact, dim, kind, seed), x) for seed in range(6)]
    for kind in ("sparse", "hadamard", "kronecker")
    for dim in dims
}
one = errors["sparse", 1024][0]
print(one.table())
print("dimensions for an error of 1 % in 95 % of pairs:", one.dimension(0.01, probability=0.95))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.9), layout="constrained")
for (kind, dim), row in errors.items():
    colour, size = {"sparse": ("#0072B2", 12), "hadamard": ("#E69F00", 6), "kronecker": ("#009E73", 8)}[kind]
    rms = sum(e.rms**2 / len(row) for e in row) ** 0.5  # over six random matrices
    left.loglog(dim, rms, "o", ms=size, color=colour, label=kind if dim == dims[0] else None)
left.loglog(dims, [errors["sparse", dim][0].expected_rms for dim in dims], color="gray", ls=":", label="predicted")
left.set_xticks(dims, [str(d) for d in dims])
left.minorticks_off()
left.set(xlabel="dimensions", ylabel="rms error", title="Error against dimension")
left.legend()
for dim, colour in zip(dims, ("#bdd7e7", "#6baed6", "#08519c"), strict=True):
    residuals = torch.cat([e.residuals for e in errors["sparse", dim]])
    right.hist(residuals, 50, color=colour, histtype="stepfilled", alpha=0.85, density=True, label=str(dim))
right.set(xlabel="projected − exact", ylabel="density", yscale="log", title="sparse: all pairs")
right.legend(title="dimensions", fontsize=8.5)
plt.show()
