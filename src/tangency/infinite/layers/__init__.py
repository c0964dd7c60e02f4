"""The layers of wide networks, to compose by hand; what is read from an nn.Module becomes the same layers.

`basic` has what most networks are made of, `spatial` what moves or mixes positions, `sequences` attention and
recurrence. `weights` decides every layer's numbers (variances, parametrisation, what is trained, learning rates),
`initial` tells from a tensor how it was initialised, `twin` makes networks that are zero at the start. Layers made of
other layers are in `infinite/compose.py`, for they take nn.Modules.

A new layer is a frozen dataclass that inherits `basic.Layer`: `grow` adds its operations to the recursion, `module` is
its finite form. If torch has a module for it, a reader in `reading/modules.py` makes it of that.
"""
