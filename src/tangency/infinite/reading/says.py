"""Which limit a module's class alone decides: what `k.spec()` says of a network before it has seen an input."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from ..._base.types import Json
from ..layers.spatial import weights_in_groups
from ..moments.core import ROWS, RUNNING, WEIGHTS
from ..moments.gated import Gates
from ..moments.ops import BatchNormalize, DropChannels, Normalize
from ..moments.sequences import Attend, Recur
from ..moments.unmerge import Unmerge
from ..moments.windowed import Windowed

_MAXIMA = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
_WORDS: dict[type | tuple[type, ...], str] = {
    (nn.Linear, nn.Bilinear): WEIGHTS.limit,
    (nn.Embedding, nn.EmbeddingBag): ROWS.limit,
    (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm): Normalize.limit,
    (nn.LSTM, nn.GRU): Gates.limit,
    nn.RNN: Recur.limit,
    nn.MultiheadAttention: Attend.limit,
    (nn.PixelShuffle, nn.Unflatten): Unmerge.limit,
    _MAXIMA: Windowed.limit,
}


def module_limits(model: nn.Module) -> dict[str, Json]:
    """Which limit is taken at each layer, by name, where its class and its mode tell; activations need none."""
    said = {name or "model": _limit(module) for name, module in model.named_modules()}
    return {name: limit for name, limit in said.items() if limit is not None}


def _limit(module: nn.Module) -> str | None:
    if isinstance(module, _ConvNd):
        return weights_in_groups(module.groups, module.groups == module.in_channels > 1).limit
    if isinstance(module, _BatchNorm):
        return RUNNING.limit if not module.training and module.track_running_stats else BatchNormalize.limit
    if isinstance(module, _DropoutNd):
        return DropChannels.limit if module.training and module.p else None
    return next((words for kinds, words in _WORDS.items() if isinstance(module, kinds)), None)
