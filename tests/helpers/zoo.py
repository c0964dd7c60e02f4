"""Tiny networks of many kinds, on which the engine must agree with the oracle in `reference.py`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._pytree import tree_map

from tangency.models import lenet5, mlp, resnet18, two_layer

Inputs = Callable[[int], Any]


@dataclass(frozen=True)
class Case:
    """A network and its inputs: a tensor, a tuple or a dict of tensors, all with the sample in their first dimension.

    `fallback` names the parameters that no structured rule is expected to cover: those that meet data in an operation
    that is neither linear in them nor elementwise (a cosine similarity, say).
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    fallback: frozenset[str] = frozenset()
    slow: bool = False


ZOO: list[Case] = []


def case(
    inputs: Inputs, fallback: Iterable[str] = (), slow: bool = False
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Add the decorated function to the zoo, under its own name."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ZOO.append(Case(make.__name__, make, inputs, frozenset(fallback), slow))
        return make

    return register


def build(case: Case, n: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    """The case's model, in evaluation mode, and inputs for n samples: the same at each call."""
    torch.manual_seed(0)
    model = case.make()
    randomise(model)
    return model.to(dtype).eval(), cast(case.inputs(n), dtype)


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Inputs with their floating tensors in `dtype` and the others, such as token ids and masks, as they are."""
    return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, x)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Perturb every constant parameter (norms, zero biases) and all running statistics, so that no bug hides there."""
    for parameter in model.parameters():
        if (parameter == parameter.flatten()[0]).all():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.3)
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2)


class Net(nn.Module):
    """Named modules and parameters, and the function of them and the inputs that is the network."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 2)


# Inputs: functions of n.


def floats(*shape: int) -> Inputs:
    return lambda n: torch.randn(n, *shape)


def ids(vocabulary: int, *shape: int) -> Inputs:
    return lambda n: torch.randint(vocabulary, (n, *shape))


def together(*inputs: Inputs) -> Inputs:
    return lambda n: tuple(each(n) for each in inputs)


def keywords(**inputs: Inputs) -> Inputs:
    return lambda n: {name: each(n) for name, each in inputs.items()}


def lengths(t: int) -> Inputs:
    """A mask of t positions that is true on the first of them, two or more."""
    return lambda n: torch.arange(t) < torch.randint(2, t + 1, (n, 1))


def text(n: int) -> dict[str, Tensor]:
    """Sentences of six tokens out of eleven, padded by token 0."""
    mask = lengths(6)(n)
    return {"input_ids": torch.randint(1, 11, (n, 6)) * mask, "attention_mask": mask.long()}


# Dense networks and shapes of outputs.


@case(floats(6))
def mlp_relu() -> nn.Module:
    return mlp([6, 9, 8, 4])


@case(floats(5))
def linear_without_bias() -> nn.Module:
    return mlp([5, 3], bias=False)


@case(floats(6))
def one_output() -> nn.Module:
    return mlp([6, 8, 1], nn.Tanh)


@case(floats(6))
def scalar_output() -> nn.Module:
    return Net(lambda net, x: net.mlp(x).squeeze(-1), mlp=mlp([6, 8, 1], nn.GELU))


@case(floats(5))
def hundred_outputs() -> nn.Module:
    return mlp([5, 6, 100], nn.SiLU)


@case(floats(5))
def shaped_outputs() -> nn.Module:
    return nn.Sequential(mlp([5, 7, 6], nn.Tanh), nn.Unflatten(1, (2, 3)))


@case(floats(5))
def two_layer_ntk() -> nn.Module:
    return two_layer(5, 16)


@case(floats(2, 3, 4))
def linear_leading_dimensions() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Flatten(2), nn.Linear(15, 3))


@case(floats(3, 4))
def flat_samples_major() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        n, t, i = x.shape
        hidden = net.first(x.reshape(n * t, i)).tanh()
        return net.second(hidden).reshape(n, t, 2).sum(1)

    return Net(forward, first=nn.Linear(4, 5), second=nn.Linear(5, 2))


@case(floats(3, 4))
def flat_positions_major() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        n, t, i = x.shape
        hidden = net.first(x.transpose(0, 1).reshape(t * n, i)).tanh()
        return net.second(hidden).reshape(t, n, 2).sum(0)

    return Net(forward, first=nn.Linear(4, 5), second=nn.Linear(5, 2))


# Convolutions.


@case(floats(3, 20, 20))
def lenet() -> nn.Module:
    return lenet5(3, size=20)


@case(floats(3, 16, 16))
def resnet_batch() -> nn.Module:
    return resnet18(3, norm="batch", width=4)


@case(floats(3, 16, 16))
def resnet_plain() -> nn.Module:
    return resnet18(3, norm="none", width=4)


def averaged(channels: int, *layers: nn.Module) -> nn.Module:
    """The layers, a GELU, the mean over positions and a linear map of the channels to three outputs."""
    return Net(
        lambda net, x: net.head(F.gelu(net.body(x)).flatten(2).mean(-1)),
        body=nn.Sequential(*layers),
        head=nn.Linear(channels, 3),
    )


@case(floats(4, 6, 7))
def conv_grouped() -> nn.Module:
    return averaged(4, nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Conv2d(6, 4, (2, 3), groups=2, bias=False))


@case(floats(2, 9, 10))
def conv_dilated() -> nn.Module:
    return averaged(4, nn.Conv2d(2, 4, 3, dilation=(2, 3), padding=(1, 2)))


@case(floats(2, 9, 10))
def conv_strided() -> nn.Module:
    return averaged(4, nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(1, 0)), nn.ReLU(), nn.Conv2d(4, 4, 2, stride=2))


@case(floats(2, 6, 7))
def conv_circular() -> nn.Module:
    return averaged(4, nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="circular"))


@case(floats(2, 6, 7))
def conv_reflect() -> nn.Module:
    return averaged(4, nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="reflect"))


@case(floats(2, 6, 7))
def conv_replicate() -> nn.Module:
    return averaged(4, nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="replicate"))


@case(floats(2, 6, 7))
def conv_same() -> nn.Module:
    """Kernels of odd and even size: `same` then pads one side more than the other."""
    return averaged(
        4, nn.Conv2d(2, 4, (3, 4), padding="same"), nn.Tanh(), nn.Conv2d(4, 4, 2, padding="same", dilation=(1, 3))
    )


@case(floats(2, 8))
def conv_1d() -> nn.Module:
    return averaged(
        4, nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(3, 4, 2, padding=1, padding_mode="circular")
    )


@case(floats(2, 4, 5, 3))
def conv_3d() -> nn.Module:
    return averaged(4, nn.Conv3d(2, 3, (2, 3, 1)), nn.Tanh(), nn.Conv3d(3, 4, 2, stride=(2, 1, 1), padding=(0, 1, 0)))


@case(floats(3, 4, 5))
def transposed() -> nn.Module:
    return averaged(
        4,
        nn.ConvTranspose2d(3, 5, (3, 2)),
        nn.Tanh(),
        nn.ConvTranspose2d(5, 4, 3, stride=(2, 3), padding=(1, 2), output_padding=(1, 2)),
    )


@case(floats(4, 4, 5))
def transposed_grouped() -> nn.Module:
    return averaged(
        6, nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=1, output_padding=1, groups=2, dilation=(2, 1))
    )


@case(floats(3, 5))
def transposed_1d() -> nn.Module:
    return averaged(4, nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, bias=False))


@case(floats(3, 8, 8))
def mobilenet() -> nn.Module:
    def separable(i: int, o: int, stride: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(i, i, 3, stride, padding=1, groups=i, bias=False)
        pointwise = nn.Conv2d(i, o, 1, bias=False)
        return [depthwise, nn.BatchNorm2d(i), nn.ReLU6(inplace=True), pointwise, nn.BatchNorm2d(o), nn.Hardswish()]

    return averaged(8, nn.Conv2d(3, 4, 3, padding=1), *separable(4, 6, 2), *separable(6, 8, 1))


@case(floats(2, 8, 8))
def depthwise_multiplier() -> nn.Module:
    return averaged(6, nn.Conv2d(2, 6, 3, groups=2))


@case(floats(1, 8, 8))
def unet() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        fine = F.relu(net.fine(x))
        coarse = F.relu(net.coarse(F.max_pool2d(fine, 2)))
        y = net.out(torch.cat([fine, net.up(coarse)], 1))
        return F.avg_pool2d(y, 4).flatten(1)

    return Net(
        forward,
        fine=nn.Conv2d(1, 3, 3, padding=1),
        coarse=nn.Conv2d(3, 5, 3, padding=1),
        up=nn.ConvTranspose2d(5, 3, 2, stride=2),
        out=nn.Conv2d(6, 2, 1),
    )


@case(floats(2, 6, 6))
def inplace_relu() -> nn.Module:
    return averaged(
        3, nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
    )


# Norms and activations with parameters.


@case(floats(3, 6))
def layer_norm() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(6), nn.Linear(6, 4), nn.GELU(), nn.LayerNorm((3, 4)), nn.Flatten(), nn.Linear(12, 3)
    )


@case(floats(2, 5, 6))
def group_norm() -> nn.Module:
    return averaged(
        6, nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.GroupNorm(1, 6)
    )


@case(floats(2, 5, 6))
def instance_norm() -> nn.Module:
    return averaged(4, nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Conv2d(4, 4, 2))


@case(floats(2, 5, 6))
def instance_norm_tracking() -> nn.Module:
    return averaged(4, nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True))


@case(floats(3, 6))
def rms_norm() -> nn.Module:
    return nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 4), nn.Tanh(), nn.RMSNorm(4), nn.Flatten(), nn.Linear(12, 3))


@case(floats(2, 5))
def batch_norm_1d() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)
    )


@case(floats(2, 5, 6))
def prelu() -> nn.Module:
    return averaged(4, nn.Conv2d(2, 4, 3), nn.PReLU(), nn.Conv2d(4, 4, 2), nn.PReLU(4))


@case(together(floats(3), floats(4)))
def bilinear() -> nn.Module:
    return Net(lambda net, x, y: net.out(net.mix(x, y).tanh()), mix=nn.Bilinear(3, 4, 5), out=nn.Linear(5, 2))


@case(floats(5))
def weight_normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3))


# Attention.


@case(floats(3, 8, 8))
def vit() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        patches = net.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([net.token.expand(len(x), -1, -1), patches], 1) + net.position
        return net.head(net.norm(net.encoder(y))[:, 0])

    layer = nn.TransformerEncoderLayer(8, 2, 12, activation="gelu", batch_first=True, norm_first=True)
    return Net(
        forward,
        patch=nn.Conv2d(3, 8, 4, stride=4),
        token=parameter(1, 1, 8),
        position=parameter(1, 5, 8),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        norm=nn.LayerNorm(8),
        head=nn.Linear(8, 3),
    )


@case(floats(4, 6))
def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 10, batch_first=True)
    return Net(lambda net, x: net.head(net.body(x).mean(1)), body=nn.TransformerEncoder(layer, 2), head=nn.Linear(6, 3))


@case(keywords(x=floats(5, 6), mask=lengths(5)))
def encoder_padded() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 10, batch_first=True)
    return Net(
        lambda net, x, mask: net.head(net.body(x, src_key_padding_mask=~mask)[:, 0]),
        body=nn.TransformerEncoder(layer, 2),
        head=nn.Linear(6, 3),
    )


@case(floats(4, 6))
def encoder_positions_major() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 10, batch_first=False)
    return Net(
        lambda net, x: net.head(net.body(x.transpose(0, 1)).mean(0)),
        body=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(6, 3),
    )


@case(together(floats(3, 6), floats(4, 6)))
def decoder() -> nn.Module:
    def forward(net: Any, x: Tensor, memory: Tensor) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype, device=x.device)
        return net.head(net.body(x, memory, tgt_mask=causal)[:, -1])

    return Net(forward, body=nn.TransformerDecoderLayer(6, 2, 10, batch_first=True), head=nn.Linear(6, 3))


@case(floats(4, 6))
def attention_self() -> nn.Module:
    return Net(lambda net, x: net.body(x, x, x)[0][:, :2], body=nn.MultiheadAttention(6, 2, batch_first=True))


@case(together(floats(3, 6), floats(4, 6)))
def attention_cross() -> nn.Module:
    return Net(
        lambda net, x, y: net.body(x, y, y, need_weights=False)[0].mean(1),
        body=nn.MultiheadAttention(6, 3, batch_first=True),
    )


@case(together(floats(3, 6), floats(4, 5), floats(4, 7)))
def attention_dimensions() -> nn.Module:
    return Net(
        lambda net, x, k, v: net.body(x, k, v)[0].mean(1),
        body=nn.MultiheadAttention(6, 2, kdim=5, vdim=7, batch_first=True),
    )


@case(together(floats(5, 6), lengths(5)))
def attention_masked() -> nn.Module:
    """A causal mask, shared by the samples, and a padding mask of each sample's own."""

    def forward(net: Any, x: Tensor, mask: Tensor) -> Any:
        causal = torch.ones(5, 5, dtype=torch.bool, device=x.device).triu(1)
        return net.body(x, x, x, attn_mask=causal, key_padding_mask=~mask)[0].mean(1)

    return Net(forward, body=nn.MultiheadAttention(6, 2, bias=False, batch_first=True))


# Language models. Their position embedding acts once for the batch.


@case(text)
def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=11,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=6,
            pad_token_id=0,
        )
    )


def gpt2() -> transformers.GPT2Config:
    return transformers.GPT2Config(
        vocab_size=11,
        n_positions=6,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_inner=12,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )


@case(text)
def gpt2_last_token() -> nn.Module:
    """Logits after the last token, of an output that is tied to the embedding."""
    return Net(lambda net, **inputs: net.model(**inputs).logits[:, -1], model=transformers.GPT2LMHeadModel(gpt2()))


@case(text)
def gpt2_classifier() -> nn.Module:
    return transformers.GPT2ForSequenceClassification(gpt2())


@case(text)
def llama() -> nn.Module:
    """With torch's RMSNorm for the library's own, which computes in float32 whatever its input."""
    model = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=6,
            pad_token_id=0,
            use_cache=False,
        )
    )
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = nn.RMSNorm(8, 1e-6), nn.RMSNorm(8, 1e-6)
    model.model.norm = nn.RMSNorm(8, 1e-6)
    return model


# Recurrence and sharing.


@case(floats(4, 3))
def lstm() -> nn.Module:
    return Net(
        lambda net, x: net.head(net.body(x)[0][:, -1]), body=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 2)
    )


@case(floats(4, 3))
def gru() -> nn.Module:
    return Net(
        lambda net, x: net.head(net.body(x)[0].mean(1)), body=nn.GRU(3, 4, batch_first=True), head=nn.Linear(4, 2)
    )


@case(floats(5))
def called_twice() -> nn.Module:
    return Net(lambda net, x: net.head(net.body(net.body(x).tanh()).tanh()), body=nn.Linear(5, 5), head=nn.Linear(5, 3))


@case(together(floats(5), floats(3, 5)))
def siamese() -> nn.Module:
    """One module called on tensors of different shapes."""
    return Net(
        lambda net, x, y: net.head(net.body(x).tanh() * net.body(y).tanh().sum(1)),
        body=nn.Linear(5, 4),
        head=nn.Linear(4, 3),
    )


@case(floats(5))
def looped() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = x
        for _ in range(3):
            hidden = torch.tanh(net.body(hidden) + x)
        return net.head(hidden)

    return Net(forward, body=nn.Linear(5, 5), head=nn.Linear(5, 3))


@case(floats(2, 4, 5))
def looped_conv() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        return net.body(F.relu(net.body(x))).mean((-2, -1))

    return Net(forward, body=nn.Conv2d(2, 2, 3, padding=1))


@case(floats(5))
def fixed_point() -> nn.Module:
    """A deep equilibrium network: z = tanh(A z + B x), iterated until it settles."""

    def forward(net: Any, x: Tensor) -> Any:
        drive = net.drive(x)
        z = torch.zeros_like(drive)
        for _ in range(20):
            z = torch.tanh(net.body(z) / 2 + drive)
        return net.head(z)

    return Net(forward, body=nn.Linear(4, 4, bias=False), drive=nn.Linear(5, 4), head=nn.Linear(4, 3))


@case(floats(5))
def tied_linears() -> nn.Module:
    """The same weight in two modules, each with its own bias."""
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(5, 3))


@case(floats(5))
def tied_transpose() -> nn.Module:
    """An autoencoder, whose decoder is the encoder's transpose."""
    return Net(
        lambda net, x: F.linear(F.linear(x, net.weight, net.bias).tanh(), net.weight.t()),
        weight=parameter(3, 5),
        bias=parameter(3),
    )


@case(ids(7, 4))
def tied_embedding() -> nn.Module:
    embedding, out = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
    out.weight = embedding.weight
    return Net(
        lambda net, x: net.out(net.hidden(net.embedding(x).mean(1)).tanh()),
        embedding=embedding,
        hidden=nn.Linear(5, 5),
        out=out,
    )


# Embeddings.


@case(ids(5, 6))
def embedding_padded() -> nn.Module:
    """Tokens repeat, and one of them, the padding, has no gradient."""
    return nn.Sequential(nn.Embedding(5, 3, padding_idx=4), nn.Flatten(), nn.Tanh(), nn.Linear(18, 4))


@case(ids(7, 4))
def embedding_bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(7, 5, mode="mean"), nn.Tanh(), nn.Linear(5, 3))


@case(ids(7, 4))
def position_embedding() -> nn.Module:
    """Positions are embedded once for the batch, as [t, d], and added by broadcasting."""
    return Net(
        lambda net, x: net.out((net.token(x) + net.position(torch.arange(4, device=x.device))).tanh().mean(1)),
        token=nn.Embedding(7, 5),
        position=nn.Embedding(4, 5),
        out=nn.Linear(5, 3),
    )


# Bare, frozen and unused parameters.


@case(floats(5))
def scale_shift() -> nn.Module:
    return Net(
        lambda net, x: net.out((net.scale * x + net.shift).tanh()) * net.temperature.exp(),
        scale=parameter(5),
        shift=parameter(5),
        temperature=parameter(),
        out=nn.Linear(5, 3),
    )


@case(floats(4, 5))
def matmul() -> nn.Module:
    return Net(
        lambda net, x: torch.einsum("nti,io->no", (x @ net.w + net.b).tanh(), net.v),
        w=parameter(5, 6),
        b=parameter(6),
        v=parameter(6, 3),
    )


@case(floats(5), fallback=["prototypes"])
def prototypes() -> nn.Module:
    return Net(
        lambda net, x: F.cosine_similarity(net.first(x)[:, None], net.prototypes[None], -1) * net.sharpness,
        first=nn.Linear(5, 4),
        prototypes=parameter(3, 4),
        sharpness=parameter(3),
    )


@case(floats(5))
def frozen_and_unused() -> nn.Module:
    model = Net(lambda net, x: net.body(x), body=mlp([5, 6, 6, 3], nn.Tanh), unused=nn.Linear(2, 2))
    for name in ["body.0.bias", "body.2.weight"]:
        model.get_parameter(name).requires_grad_(False)
    return model


@case(floats(2, 6, 6))
def no_grad_backbone() -> nn.Module:
    """The backbone's parameters ask for gradients, which are zero."""

    def forward(net: Any, x: Tensor) -> Any:
        with torch.no_grad():
            features = net.backbone(x)
        return net.head(features)

    backbone = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten())
    return Net(forward, backbone=backbone, head=mlp([48, 5, 3]))


# Several inputs.


@case(together(floats(4), floats(3, 5)))
def tuple_inputs() -> nn.Module:
    return Net(
        lambda net, x, y: net.out(torch.cat([net.left(x), net.right(y).amax(1)], -1).tanh()),
        left=nn.Linear(4, 3),
        right=nn.Linear(5, 3),
        out=nn.Linear(6, 2),
    )


@case(keywords(image=floats(3, 6, 6), kind=ids(5), tags=ids(6, 3), age=floats()))
def dict_inputs() -> nn.Module:
    """Images with metadata: a category, three tags and a number."""

    def forward(net: Any, image: Tensor, kind: Tensor, tags: Tensor, age: Tensor) -> Any:
        features = [F.relu(net.image(image)).mean((-2, -1)), net.kind(kind), net.tags(tags).sum(1), age[:, None]]
        return net.out(torch.cat(features, -1))

    return Net(
        forward,
        image=nn.Conv2d(3, 4, 3),
        kind=nn.Embedding(5, 3),
        tags=nn.Embedding(6, 2),
        out=mlp([10, 6, 3], nn.Tanh),
    )
