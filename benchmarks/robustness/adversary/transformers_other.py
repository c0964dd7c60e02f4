"""transformers: images, sound, video and several of these together, from their configurations."""

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from benchmarks.robustness.adversary.entry import CLASSES, VOCABULARY, Entry, entry, family, rows

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
VIT = SIZES | {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_labels": CLASSES}
WINDOWS = {
    "image_size": 32,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 4,
    "num_labels": CLASSES,
}

# Classifiers of images: the configuration's name, the image's size and what makes it small.
CLASSIFIERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "beit": ("beit", 16, VIT | {"use_relative_position_bias": True}),
    "bit": ("bit", 32, STAGES | {"embedding_size": 8, "num_groups": 2, "hidden_sizes": [16, 32]}),
    "convnext": ("convnext", 32, STAGES | {"num_stages": 2}),
    "convnextv2": ("convnextv2", 32, STAGES | {"num_stages": 2}),
    "data2vec_vision": ("data2vec-vision", 16, VIT),
    "dinov2": ("dinov2", 16, VIT),
    "dinov2_registers": ("dinov2_with_registers", 16, VIT | {"num_register_tokens": 2}),
    "donut_swin": ("donut-swin", 32, WINDOWS),
    "efficientnet": (
        "efficientnet",
        32,
        {
            "width_coefficient": 0.1,
            "depth_coefficient": 0.1,
            "hidden_dim": 128,
            "image_size": 32,
            "num_labels": CLASSES,
        },
    ),
    "focalnet": (
        "focalnet",
        32,
        {
            "image_size": 32,
            "embed_dim": 8,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "num_labels": CLASSES,
        },
    ),
    "hiera": (
        "hiera",
        32,
        {
            "image_size": [32, 32],
            "embed_dim": 8,
            "depths": [1, 1, 1],
            "num_heads": [1, 1, 2],
            "num_query_pool": 2,
            "masked_unit_size": [4, 4],
            "masked_unit_attention": [True, True, False],
            "num_labels": CLASSES,
        },
    ),
    "ijepa": ("ijepa", 16, VIT),
    "mobilenet_v1": ("mobilenet_v1", 32, {"image_size": 32, "depth_multiplier": 0.1, "num_labels": CLASSES}),
    "mobilenet_v2": ("mobilenet_v2", 32, {"image_size": 32, "depth_multiplier": 0.1, "num_labels": CLASSES}),
    "mobilevit": (
        "mobilevit",
        32,
        {
            "image_size": 32,
            "hidden_sizes": [8, 8, 8],
            "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16],
            "num_attention_heads": 2,
            "num_labels": CLASSES,
        },
    ),
    "poolformer": ("poolformer", 32, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": CLASSES}),
    "pvt": (
        "pvt",
        32,
        {
            "image_size": 32,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "sequence_reduction_ratios": [2, 2, 1, 1],
            "num_labels": CLASSES,
        },
    ),
    "regnet": ("regnet", 32, STAGES | {"embedding_size": 8, "groups_width": 4}),
    "resnet": ("resnet", 32, STAGES | {"embedding_size": 8, "layer_type": "basic"}),
    "segformer": (
        "segformer",
        32,
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
            "num_labels": CLASSES,
        },
    ),
    "siglip": ("siglip", 16, {"vision_config": VIT, "num_labels": CLASSES}),
    "swiftformer": (
        "swiftformer",
        64,
        {"image_size": 64, "embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": CLASSES},
    ),
    "swin": ("swin", 32, WINDOWS),
    "swinv2": ("swinv2", 32, WINDOWS),
    "textnet": (
        "textnet",
        32,
        {"image_size": [32, 32], "stem_out_channels": 4, "hidden_sizes": [4, 4, 8, 8, 8], "num_labels": CLASSES},
    ),
    "vit": ("vit", 16, VIT),
    "vit_msn": ("vit_msn", 16, VIT),
}


def classifier(kind: str, options: dict[str, Any]) -> nn.Module:
    return AutoModelForImageClassification.from_config(AutoConfig.for_model(kind, **options))


def made(model: str, config: str, **options: Any) -> nn.Module:
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def base(kind: str, **options: Any) -> nn.Module:
    return AutoModel.from_config(AutoConfig.for_model(kind, **options))


TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
CONTRAST = {"text_config": TEXT | {"pad_token_id": 0}, "vision_config": VIT, "projection_dim": CLASSES}
PICTURE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class AgainstOnePicture(nn.Module):
    """Texts against one picture that the module holds."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.both = base(kind, **options)
        self.register_buffer("picture", PICTURE)

    def forward(self, input_ids: Tensor) -> Tensor:
        out = self.both(input_ids=input_ids, pixel_values=self.picture)
        return torch.cat([out.logits_per_text, out.text_embeds[:, :4]], 1)


def image_and_text(n: int) -> dict[str, Tensor]:
    words = torch.randint(3, VOCABULARY, (n, 6))
    words[:, -1] = VOCABULARY - 1  # the end, where CLIP looks for a text's features
    return {"input_ids": words, "pixel_values": torch.randn(n, 3, 16, 16)}


def only(name: str) -> Any:
    return lambda n: {name: image_and_text(n)[name]}


def matched(out: Any) -> Tensor:
    """Each text with its own picture."""
    return torch.cat([out.text_embeds[:, :3] * out.image_embeds[:, :3], out.image_embeds[:, 3:CLASSES]], 1)


SOUND = {
    "conv_dim": [8, 8],
    "conv_stride": [4, 2],
    "conv_kernel": [8, 4],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": VOCABULARY,
    "num_labels": CLASSES,
    "classifier_proj_size": 8,
}
WHISPER = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "classifier_proj_size": 8,
    "num_labels": CLASSES,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}
PERCEIVER = {
    "num_latents": 4,
    "d_latents": 16,
    "d_model": 16,
    "num_self_attends_per_block": 1,
    "num_self_attention_heads": 2,
    "num_cross_attention_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8,
    "num_labels": CLASSES,
}
VIDEO = VIT | {"num_frames": 2, "num_labels": CLASSES}
SERIES = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "num_input_channels": 2, "d_model": 8}
DETECTOR = {"image_size": [16, 16], "patch_size": 4, "num_labels": CLASSES, "num_detection_tokens": 3}


def mean_logits(out: Any) -> Tensor:
    return out.logits.flatten(2).mean(2) if out.logits.dim() == 4 else out.logits.mean(1)


LEVIT = {
    "image_size": 64,
    "hidden_sizes": [8, 16, 16],
    "num_attention_heads": [1, 2, 2],
    "depths": [1, 1, 1],
    "key_dim": [4, 4, 4],
    "num_labels": CLASSES,
}
AUDIO, CLIP = rows(200), rows(2, 3, 16, 16)
OTHERS = [
    entry("deit", partial(made, "DeiTForImageClassification", "DeiTConfig", **VIT), rows(3, 16, 16)),
    entry("levit", partial(made, "LevitForImageClassification", "LevitConfig", **LEVIT), rows(3, 64, 64)),
    entry("clip", partial(base, "clip", **CONTRAST), image_and_text, matched),
    entry(
        "clip_text",
        partial(made, "CLIPTextModelWithProjection", "CLIPTextConfig", projection_dim=CLASSES, pad_token_id=0, **TEXT),
        only("input_ids"),
        "text_embeds",
    ),
    entry(
        "clip_vision",
        partial(made, "CLIPVisionModelWithProjection", "CLIPVisionConfig", projection_dim=CLASSES, **VIT),
        only("pixel_values"),
        "image_embeds",
    ),
    entry("clip_one_picture", partial(AgainstOnePicture, "clip", **CONTRAST), only("input_ids")),
    entry(
        "siglip_one_picture",
        partial(AgainstOnePicture, "siglip", text_config=TEXT | {"pad_token_id": 0}, vision_config=VIT),
        only("input_ids"),
    ),
    entry(
        "segformer_semantic",
        partial(made, "SegformerForSemanticSegmentation", "SegformerConfig", **CLASSIFIERS["segformer"][2]),
        rows(3, 32, 32),
        mean_logits,
    ),
    entry("wav2vec2", partial(made, "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **SIZES, **SOUND), AUDIO),
    entry(
        "wav2vec2_stable",
        partial(
            made,
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            do_stable_layer_norm=True,
            feat_extract_norm="layer",
            **SIZES,
            **SOUND,
        ),
        AUDIO,
    ),
    entry("hubert", partial(made, "HubertForSequenceClassification", "HubertConfig", **SIZES, **SOUND), AUDIO),
    entry(
        "wavlm", partial(made, "WavLMForSequenceClassification", "WavLMConfig", num_buckets=8, **SIZES, **SOUND), AUDIO
    ),
    entry("whisper_encoder", partial(made, "WhisperForAudioClassification", "WhisperConfig", **WHISPER), rows(8, 16)),
    entry(
        "spectrogram",
        partial(
            made,
            "ASTForAudioClassification",
            "ASTConfig",
            num_mel_bins=16,
            max_length=16,
            frequency_stride=8,
            time_stride=8,
            **(VIT | {"patch_size": 8}),
        ),
        rows(16, 16),
    ),
    entry(
        "perceiver_text",
        partial(made, "PerceiverForSequenceClassification", "PerceiverConfig", **PERCEIVER),
        lambda n: {
            "inputs": torch.randint(3, VOCABULARY, (n, 6)),
            "attention_mask": torch.ones(n, 6, dtype=torch.long),
        },
    ),
    entry("timesformer", partial(made, "TimesformerForVideoClassification", "TimesformerConfig", **VIDEO), CLIP),
    entry("videomae", partial(made, "VideoMAEForVideoClassification", "VideoMAEConfig", **VIDEO), CLIP),
    entry("vivit", partial(made, "VivitForVideoClassification", "VivitConfig", tubelet_size=[1, 4, 4], **VIDEO), CLIP),
    entry(
        "yolos",
        partial(made, "YolosForObjectDetection", "YolosConfig", **SIZES, **DETECTOR),
        rows(3, 16, 16),
        mean_logits,
    ),
    entry(
        "patchtst",
        partial(
            made,
            "PatchTSTForRegression",
            "PatchTSTConfig",
            num_targets=CLASSES,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=16,
            **SERIES,
        ),
        rows(16, 2),
        "regression_outputs",
    ),
    entry(
        "decision_transformer",
        partial(made, "GPT2Model", "GPT2Config", n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=VOCABULARY),
        lambda n: {"inputs_embeds": torch.randn(n, 5, 16)},
        lambda out: out[0][:, -1, :CLASSES],
    ),
    entry(
        "vit_mae_encoder",
        partial(made, "ViTModel", "ViTConfig", **VIT),
        rows(3, 16, 16),
        lambda out: out.pooler_output[:, :CLASSES],
    ),
    entry(
        "blip_vision",
        partial(made, "BlipVisionModel", "BlipVisionConfig", **VIT),
        rows(3, 16, 16),
        lambda out: out.pooler_output[:, :CLASSES],
    ),
    entry(
        "bert_embeddings",
        partial(made, "BertForSequenceClassification", "BertConfig", num_labels=CLASSES, **TEXT, pad_token_id=0),
        lambda n: {"inputs_embeds": torch.randn(n, 5, 16)},
    ),
]
ENTRIES: list[Entry] = family(
    "transformers",
    [
        entry(f"hf_{name}", partial(classifier, kind, options), rows(3, size, size))
        for name, (kind, size, options) in CLASSIFIERS.items()
    ]
    + [entry("hf_" + e.name, e.make, e.sample, e.outputs) for e in OTHERS],
)
