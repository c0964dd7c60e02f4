"""Where the taps of a convolution lie."""

from typing import NamedTuple

from torch import Tensor


class Lattice(NamedTuple):
    """The taps of a convolution in two dimensions: tap v of position y lies on pixel y·stride − before + v·gap."""

    pixels: tuple[int, int]
    positions: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]
    gap: tuple[int, int]


class Places(NamedTuple):
    """On which pixel each tap of each position lies: [t, taps], −1 outside; and its rule, if in two dimensions."""

    table: Tensor
    lattice: Lattice | None
