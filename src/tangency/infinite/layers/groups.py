"""Groups of channels (grouped convolutions, GroupNorm): which limit is taken, and where that is far from the module."""

import warnings

from ...errors import TangencyWarning
from ..moments.fields import Builder

# Channels of a group from which on the limit is taken in silence: with 16 the covariance after ReLU is 1 % off behind a
# grouped 1×1 convolution (simulated: 8 % with 2, 4 % with 4, 2 % with 8), less behind wider windows and GroupNorm.
ENOUGH = 16


def warn_few(build: Builder, width: int, groups: int) -> None:
    """Say, once for each layer of a kernel, that the module has few channels in each of its groups, the limit many.

    As a network widens, the number of groups stays and their channels become infinitely many: what `groups=k` and
    `GroupNorm(k, …)` say. Who keeps the channels of a group (ResNeXt, RegNet) has other networks in the limit, whose
    groups stay random; those have no rule here.
    """
    if groups == 1 or width // groups >= ENOUGH or ("groups", build.where) in build.warned:
        return
    build.warned.add(("groups", build.where))
    warnings.warn(
        f"{build.where}: has {groups} groups of {width // groups} channels; the limit has as many groups, of "
        f"infinitely many channels. A network that widens by more groups of {width // groups} tends to another kernel. "
        "Keep the number of groups as the width grows, or use groups=1.",
        TangencyWarning,
        stacklevel=2,
    )
