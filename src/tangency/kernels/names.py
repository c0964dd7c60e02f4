"""The names of the kernels that `tg.explain` and `tg.audit` compare; --help shows them without importing one."""

TITLES = {
    "trNTK": "cosine of the tangent kernel's trace over outputs",
    "trNTK⁰": "trace of the tangent kernel over outputs",
    "pNTK": "cosine of the pseudo tangent kernel (of the outputs' sum)",
    "Em": "cosine of the hidden layers' embeddings together",
    "CK": "cosine of the last hidden layer (conjugate kernel)",
    "proj-trNTK": "cosine of the tangent kernel's trace over outputs, projected to 10,240 dimensions",
    "proj-pNTK": "cosine of the pseudo tangent kernel, projected to 10,240 dimensions",
}
