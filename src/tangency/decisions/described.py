"""What to call a model that was given no name."""

from torch import nn

_CONVOLUTIONS = nn.modules.conv._ConvNd
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def described(model: nn.Module) -> str:
    """The model's class, if somebody gave it a name; of torch's own classes, what it is made of.

    Layers are linear and convolutional ones.

    >>> described(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)))
    'CNN of 2 layers with 74 parameters'
    """
    kind = type(model)
    if not kind.__module__.startswith("torch."):
        return kind.__name__
    modules = list(model.modules())
    layers = sum(isinstance(m, (nn.Linear, nn.Bilinear, _CONVOLUTIONS)) for m in modules)
    size = f"with {sum(p.numel() for p in model.parameters()):,} parameters"
    if any(isinstance(m, _ATTENTION) for m in modules):
        return f"Transformer {size}"
    if any(isinstance(m, (nn.RNNBase, nn.RNNCellBase)) for m in modules):
        return f"Recurrent network {size}"
    if any(isinstance(m, _CONVOLUTIONS) for m in modules):
        return f"CNN of {layers} layer{'s' * (layers > 1)} {size}"
    return f"MLP of {layers} layers {size}" if layers > 1 else f"{'Linear model' if layers else 'Network'} {size}"
