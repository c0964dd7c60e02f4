"""The model families that `model_families` tries: as torchvision, timm, transformers and torch ship them, small.

Nothing is downloaded: weights are random, and where a family has a configuration it is a tiny one.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Samples = Tensor | dict[str, Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Family:
    """A family: who ships it, how it is made, and two samples for it."""

    name: str
    library: str
    make: Callable[[], nn.Module]
    samples: Callable[[], Samples]


def stub_torchvision() -> None:
    """torchvision's C++ operators do not load beside every torch; no classifier needs them."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    one, size = "Tensor dets, Tensor scores", "float scale, SymInt h, SymInt w"
    forms = {
        "nms": f"({one}, float iou) -> Tensor",
        "qnms": f"({one}, float iou) -> Tensor",
        "roi_align": f"(Tensor x, Tensor rois, {size}, int ratio, bool aligned) -> Tensor",
        "roi_pool": f"(Tensor x, Tensor rois, {size}) -> (Tensor, Tensor)",
        "ps_roi_align": f"(Tensor x, Tensor rois, {size}, int ratio) -> (Tensor, Tensor)",
        "ps_roi_pool": f"(Tensor x, Tensor rois, {size}) -> (Tensor, Tensor)",
        "deform_conv2d": "(Tensor x) -> Tensor",
    }
    for name, form in forms.items():
        for which in (name, f"_{name}_backward"):
            try:
                library.define(f"{which}{form}")
            except RuntimeError:  # it is there
                continue
    LIBRARIES.append(library)


LIBRARIES: list[Any] = []  # a library that is let go takes its operators with it


def images(size: int = 32, frames: int = 0) -> Callable[[], Tensor]:
    """Two pictures, or films."""
    shape = (2, 3, *([frames] if frames else []), size, size)
    return lambda: torch.randn(shape, generator=torch.Generator().manual_seed(0))


def tokens(mask: bool = True, length: int = 6) -> Callable[[], dict[str, Tensor]]:
    """Two sentences, the first one shorter."""

    def make() -> dict[str, Tensor]:
        """Indices, and which of them are real."""
        ids = torch.randint(2, 50, (2, length), generator=torch.Generator().manual_seed(0))
        real = torch.ones_like(ids)
        real[0, -2:] = 0
        return {"input_ids": ids, "attention_mask": real} if mask else {"input_ids": ids}

    return make


def _vision(name: str, size: int = 32, **options: Any) -> Family:
    def make() -> nn.Module:
        """The network of this name, without weights."""
        models = importlib.import_module("torchvision.models")
        return models.get_model(name, weights=None, num_classes=10, **options)

    return Family(name, "torchvision", make, images(size))


def _vision_class(name: str, module: str, kind: str, size: int = 32, **options: Any) -> Family:
    def make() -> nn.Module:
        """A small network of this class."""
        return getattr(importlib.import_module(f"torchvision.models.{module}"), kind)(**options)

    return Family(name, "torchvision", make, images(size))


def _timm(name: str, size: int = 32, **options: Any) -> Family:
    def make() -> nn.Module:
        """The network of this name, without weights."""
        timm = importlib.import_module("timm")
        return timm.create_model(name, pretrained=False, num_classes=10, **options)

    return Family(name, "timm", make, images(size))


def _mixer(name: str, block: str, ratio: float | tuple[float, float]) -> Family:
    def make() -> nn.Module:
        """One block of timm's MlpMixer, of this kind."""
        mixer = importlib.import_module("timm.models.mlp_mixer")
        kind, sizes = getattr(mixer, block), {"img_size": 32, "patch_size": 8, "num_blocks": 1, "embed_dim": 16}
        return mixer.MlpMixer(num_classes=10, block_layer=kind, mlp_ratio=ratio, **sizes)

    return Family(name, "timm", make, images())


TEXT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50,
    "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
PICTURE = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


def _hugging(
    name: str, kind: str, base: dict[str, Any], samples: Callable[[], Samples] | None = None, **options: Any
) -> Family:
    def make() -> nn.Module:
        """A tiny network of this class."""
        transformers = importlib.import_module("transformers")
        made = getattr(transformers, kind)
        return made(made.config_class(**(base | options)))

    usual = tokens() if base is TEXT else lambda: {"pixel_values": images(16)()}
    return Family(name, "transformers", make, samples or usual)


class LeNet5(nn.Module):
    """LeCun et al. 1998, as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Pictures [n, 3, 32, 32] to scores."""
        scores: Tensor = self.classifier(self.features(x))
        return scores


class NanoBlock(nn.Module):
    """A block of a decoder as nanoGPT writes it."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[n, t, width] to the same."""
        n, t, width = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (h.view(n, t, self.heads, width // self.heads).transpose(1, 2) for h in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(n, t, width))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Such a decoder of two blocks, with a head of its own."""

    def __init__(self, width: int = 16, heads: int = 2, scores: int = 50) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList([NanoBlock(width, heads), NanoBlock(width, heads)])
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, scores, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """The scores of what follows the last index."""
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.size(1), device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.out(self.norm(x)[:, [-1], :])
        return scores


class TextCNN(nn.Module):
    """Kim 2014: convolutions of several widths over words, and the maximum over time of each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8), nn.Linear(24, 2)
        self.convs = nn.ModuleList([nn.Conv1d(8, 8, k) for k in (2, 3, 4)])

    def forward(self, input_ids: Tensor) -> Tensor:
        """Indices [n, t] to scores."""
        x = self.words(input_ids).transpose(1, 2)
        scores: Tensor = self.out(torch.cat([torch.relu(conv(x)).amax(-1) for conv in self.convs], 1))
        return scores


class UNet(nn.Module):
    """Ronneberger et al. 2015, one step down and up, pooled at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.join, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Pictures to scores."""
        first = torch.relu(self.down(x))
        low = torch.relu(self.low(nn.functional.max_pool2d(first, 2)))
        joined = torch.relu(self.join(torch.cat([first, self.up(low)], 1)))
        scores: Tensor = self.out(joined.mean((2, 3)))
        return scores


def _discriminator() -> nn.Module:
    """DCGAN's, of Radford et al. 2015."""
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 16), (16, 32)):
        layers += [
            nn.Conv2d(before, after, 4, 2, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.LeakyReLU(0.2, inplace=True),
        ]
    return nn.Sequential(*layers, nn.Conv2d(32, 1, 4), nn.Flatten())


class Recurrent(nn.Module):
    """A classifier by the last state of nn.RNN, nn.LSTM or nn.GRU."""

    def __init__(self, kind: Callable[..., nn.Module], inputs: int = 8, width: int = 16) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(50, inputs), kind(inputs, width, batch_first=True)
        self.out = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Indices [n, t] to scores."""
        states, _ = self.layer(self.words(input_ids))
        scores: Tensor = self.out(states[:, -1])
        return scores


class Encoder(nn.Module):
    """nn.TransformerEncoder as a classifier."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.words = nn.Embedding(50, 16)
        self.layers, self.out = nn.TransformerEncoder(layer, 2), nn.Linear(16, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Indices [n, t] to scores."""
        scores: Tensor = self.out(self.layers(self.words(input_ids)).mean(1))
        return scores


class Translator(nn.Module):
    """nn.Transformer, from one sequence to another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.others, self.out = nn.Embedding(50, 16), nn.Embedding(50, 16), nn.Linear(16, 2)
        self.layers = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)

    def forward(self, input_ids: Tensor, target: Tensor) -> Tensor:
        """Indices of both to scores."""
        scores: Tensor = self.out(self.layers(self.words(input_ids), self.others(target)).mean(1))
        return scores


def _two_sequences() -> dict[str, Tensor]:
    return {**tokens(mask=False)(), "target": torch.arange(12).reshape(2, 6)}


SMALL = {"img_size": 32, "patch_size": 8}
FAMILIES: list[Family] = [
    Family("LeNet-5", "torch", LeNet5, images()),
    Family("RNN classifier", "torch", lambda: Recurrent(nn.RNN), tokens(mask=False)),
    Family("LSTM classifier", "torch", lambda: Recurrent(nn.LSTM), tokens(mask=False)),
    Family("GRU classifier", "torch", lambda: Recurrent(nn.GRU), tokens(mask=False)),
    Family("nn.TransformerEncoder", "torch", Encoder, tokens(mask=False)),
    Family("nn.Transformer", "torch", Translator, _two_sequences),
    Family("nanoGPT", "torch", NanoGPT, tokens(mask=False)),
    Family("TextCNN", "torch", TextCNN, tokens(mask=False)),
    Family("U-Net", "torch", UNet, images(8)),
    Family("DCGAN discriminator", "torch", _discriminator, images(32)),
    _vision("alexnet", 64),
    _vision("vgg11"),
    _vision("vgg11_bn"),
    _vision("resnet18"),
    _vision("resnet50"),
    _vision("resnext50_32x4d"),
    _vision("wide_resnet50_2"),
    _vision("densenet121"),
    _vision("squeezenet1_1"),
    _vision("googlenet", aux_logits=False, init_weights=False),
    _vision("inception_v3", 75, aux_logits=False, init_weights=False),
    _vision("mobilenet_v2"),
    _vision("mobilenet_v3_small"),
    _vision("shufflenet_v2_x0_5"),
    _vision("mnasnet0_5"),
    _vision("efficientnet_b0"),
    _vision("efficientnet_v2_s"),
    _vision("regnet_y_400mf"),
    _vision("regnet_x_400mf"),
    _vision("convnext_tiny"),
    _vision_class(
        "vit_b_16 (small)", "vision_transformer", "VisionTransformer", image_size=32, patch_size=8, num_layers=1,
        num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=10,
    ),
    _vision_class(
        "swin_t (small)", "swin_transformer", "SwinTransformer", patch_size=[4, 4], embed_dim=16, depths=[2],
        num_heads=[2], window_size=[4, 4], num_classes=10,
    ),
    _timm("resnet18"),
    _timm("resnet26d"),
    _timm("seresnet18"),
    _timm("resnetv2_50"),
    _timm("skresnet18"),
    _timm("res2net50_26w_4s"),
    _timm("cspresnet50"),
    _timm("darknet53"),
    _timm("dla34"),
    _timm("hrnet_w18_small"),
    _timm("repvgg_a0"),
    _timm("nf_resnet50"),
    _timm("convnext_atto"),
    _timm("convnextv2_atto"),
    _timm("inception_next_tiny"),
    _timm("mambaout_femto", 64),
    _timm("mobilenetv3_small_050"),
    _timm("lcnet_050"),
    _timm("ghostnet_050"),
    _timm("rexnet_100"),
    _timm("efficientnet_lite0"),
    _timm("regnetx_002"),
    _timm("ese_vovnet19b_dw"),
    _timm("mobilevit_xxs", 64),
    _timm("edgenext_xx_small", 64),
    _timm("poolformer_s12", 64),
    _mixer("mixer_s16_224 (small)", "MixerBlock", (0.5, 4.0)),
    _mixer("resmlp_12_224 (small)", "ResBlock", 4.0),
    _timm("gmlp_ti16_224", img_size=32),
    _timm("vit_tiny_patch16_224", **SMALL, depth=1, embed_dim=16, num_heads=2),
    _timm("deit_tiny_distilled_patch16_224", **SMALL, depth=1, embed_dim=16, num_heads=2),
    _timm("beit_base_patch16_224", **SMALL, depth=1, embed_dim=16, num_heads=2),
    _timm("cait_xxs24_224", **SMALL, depth=1, depth_token_only=1, embed_dim=16, num_heads=2),
    _timm("xcit_nano_12_p8_224", **SMALL, depth=1, cls_attn_layers=1, embed_dim=16, num_heads=2),
    _timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(2,), embed_dim=16, num_heads=(2,)),
    _timm("levit_128s", 64, img_size=64),
    _timm("pit_ti_224", 64, img_size=64),
    _hugging("BERT", "BertForSequenceClassification", TEXT),
    _hugging("RoBERTa", "RobertaForSequenceClassification", TEXT, max_position_embeddings=20),
    _hugging("ALBERT", "AlbertForSequenceClassification", TEXT, embedding_size=8, num_hidden_layers=2),
    _hugging("ELECTRA", "ElectraForSequenceClassification", TEXT, embedding_size=16),
    _hugging("DistilBERT", "DistilBertForSequenceClassification", {}, tokens(), dim=16, n_layers=1, n_heads=2,
             hidden_dim=32, vocab_size=50, max_position_embeddings=16),
    _hugging("DeBERTa-v2", "DebertaV2ForSequenceClassification", TEXT),
    _hugging("MPNet", "MPNetForSequenceClassification", TEXT, max_position_embeddings=20),
    _hugging("GPT-2", "GPT2Model", {}, tokens(), n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=16,
             bos_token_id=0, eos_token_id=1),
    _hugging("GPT-Neo", "GPTNeoModel", {}, tokens(), hidden_size=16, num_layers=1, num_heads=2, vocab_size=50,
             attention_types=[[["global"], 1]], max_position_embeddings=16, bos_token_id=0, eos_token_id=1),
    _hugging("GPT-NeoX (Pythia)", "GPTNeoXModel", TEXT),
    _hugging("OPT", "OPTModel", TEXT, ffn_dim=32, word_embed_proj_dim=16),
    _hugging("BLOOM", "BloomModel", {}, tokens(), hidden_size=16, n_layer=1, n_head=2, vocab_size=50),
    _hugging("Llama", "LlamaModel", TEXT),
    _hugging("Mistral", "MistralModel", TEXT, num_attention_heads=4, num_key_value_heads=2),
    _hugging("Mistral (a single key head)", "MistralModel", TEXT, num_key_value_heads=1),
    _hugging("Qwen2", "Qwen2Model", TEXT, num_attention_heads=4, num_key_value_heads=2),
    _hugging("Qwen2 (a single key head)", "Qwen2Model", TEXT, num_key_value_heads=1),
    _hugging("Gemma (7B's heads)", "GemmaModel", TEXT, num_key_value_heads=2, head_dim=8),
    _hugging("Gemma (2B's single key head)", "GemmaModel", TEXT, num_key_value_heads=1, head_dim=8),
    _hugging("Phi", "PhiModel", TEXT),
    _hugging("T5 encoder", "T5EncoderModel", {}, tokens(), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
             vocab_size=50),
    _hugging("Mamba", "MambaModel", {}, tokens(mask=False), hidden_size=16, num_hidden_layers=1, vocab_size=50,
             state_size=4),
    _hugging("ViT", "ViTForImageClassification", PICTURE),
    _hugging("DeiT", "DeiTForImageClassification", PICTURE),
    _hugging("BEiT", "BeitForImageClassification", PICTURE),
    _hugging("DINOv2", "Dinov2ForImageClassification", PICTURE),
    _hugging("CLIP vision (with two outputs)", "CLIPVisionModel", PICTURE),
    _hugging("CLIP vision", "CLIPForImageClassification", {}, lambda: {"pixel_values": images(16)()},
             vision_config=PICTURE, text_config=TEXT),
    _hugging("Swin", "SwinForImageClassification", {}, lambda: {"pixel_values": images(16)()}, image_size=16,
             patch_size=2, embed_dim=8, depths=[1], num_heads=[2], window_size=4),
    _hugging("SegFormer", "SegformerForImageClassification", {}, lambda: {"pixel_values": images()()},
             depths=[1] * 4, hidden_sizes=[8] * 4, num_attention_heads=[1] * 4),
    _hugging("ResNet", "ResNetForImageClassification", {}, lambda: {"pixel_values": images()()},
             embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    _hugging("ConvNeXt", "ConvNextForImageClassification", {}, lambda: {"pixel_values": images()()},
             hidden_sizes=[8, 16, 16, 16], depths=[1] * 4),
    _hugging("MobileNetV2", "MobileNetV2ForImageClassification", {}, lambda: {"pixel_values": images()()}),
    _hugging("Wav2Vec2", "Wav2Vec2Model", {}, lambda: {"input_values": torch.randn(2, 400)}, hidden_size=16,
             num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 2),
             conv_kernel=(10, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2),
]  # fmt: skip

# Added, or given other options, after a first look at what is refused: the share without them is the honest one.
AFTERWARDS = {
    "nanoGPT", "TextCNN", "U-Net", "DCGAN discriminator", "Mistral", "Qwen2", "Gemma (7B's heads)", "CLIP vision",
}  # fmt: skip
