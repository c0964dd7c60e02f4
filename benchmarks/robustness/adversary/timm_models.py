"""timm: one model or more of each family, by entry point with small sizes, or by class where that takes none."""

from functools import partial
from typing import Any

import timm
from timm.layers import GatedMlp, GluMlp
from timm.models import (
    byobnet,
    convmixer,
    focalnet,
    gcvit,
    ghostnet,
    hgnet,
    maxxvit,
    metaformer,
    mlp_mixer,
    mvitv2,
    nest,
    nfnet,
    regnet,
    vitamin,
    volo,
    vovnet,
)
from torch import nn

from benchmarks.robustness.adversary.entry import CLASSES, Entry, entry, family, images

FOUR = {"depths": (1, 1, 1, 1)}
DIMS = {"dims": (8, 8, 16, 16)} | FOUR
EMBED = {"embed_dims": (8, 8, 16, 16)} | FOUR
HEADS = {"num_heads": (1, 1, 2, 2)}
VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
WINDOWS = {"img_size": 32, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}
RESNET = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}

# By entry point: image size, then what makes it small.
NAMED: dict[str, tuple[int, dict[str, Any]]] = {
    "beit_base_patch16_224": (16, VIT),
    "beitv2_base_patch16_224": (16, VIT),
    "cait_xxs24_224": (16, VIT),
    "coat_tiny": (32, {"img_size": 32, "embed_dims": (16, 16, 16, 16), "serial_depths": (1, 1, 1, 1)}),
    "convit_tiny": (16, VIT | {"embed_dim": 8, "local_up_to_layer": 1}),
    "convnextv2_atto": (32, DIMS),
    "crossvit_tiny_240": (
        32,
        {
            "img_size": 32,
            "img_scale": (1.0, 1.0),
            "patch_size": [4, 8],
            "embed_dim": [8, 16],
            "depth": [[1, 1, 0]],
            "num_heads": [2, 2],
            "mlp_ratio": [2, 2, 1],
        },
    ),
    "davit_tiny": (32, {"embed_dims": (8, 16), "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}),
    "deit3_small_patch16_224": (16, VIT),
    "deit_tiny_distilled_patch16_224": (16, VIT),
    "densenet121": (32, {"growth_rate": 4, "block_config": (2, 2)}),
    "dla46_c": (32, {"channels": (8, 8, 8, 8, 16, 16)}),
    "ecaresnet50d": (32, RESNET | {"stem_width": 4}),
    "edgenext_xx_small": (32, {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "heads": (2, 2, 2, 2)}),
    "efficientformer_l1": (224, EMBED | {"num_vit": 1}),
    "efficientformerv2_s0": (64, EMBED | {"img_size": 64}),
    "efficientvit_b0": (
        32,
        {"widths": (4, 4, 8, 8, 16), "depths": (1, 1, 1, 1, 1), "head_dim": 4, "head_widths": (16, 16)},
    ),
    "efficientvit_m0": (64, {"img_size": 64, "embed_dim": (8, 16, 16), "key_dim": (4, 4, 4), "num_heads": (2, 2, 2)}),
    "eva02_tiny_patch14_224": (16, VIT),
    "eva_giant_patch14_224": (16, VIT),
    "fasternet_t0": (32, {"embed_dim": 8, "depths": (1, 1, 1, 1), "feature_dim": 16}),
    "fastvit_t8": (64, {"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 32)}),
    "fastvit_sa12": (64, {"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 32)}),
    "hiera_tiny_224": (
        32,
        {"img_size": (32, 32), "embed_dim": 8, "stages": (1, 1, 1), "q_pool": 2, "mask_unit_size": (4, 4)},
    ),
    "inception_next_tiny": (32, DIMS),
    "lcnet_035": (32, {}),
    "levit_128s": (32, {"img_size": 32, "embed_dim": (16, 24), "key_dim": 8, "depth": (1, 1), "num_heads": (2, 3)}),
    "mambaout_femto": (32, DIMS),
    "mobilenetv3_small_050": (32, {}),
    "mobilevit_xxs": (32, {}),
    "pit_ti_224": (
        32,
        {"img_size": 32, "patch_size": 8, "stride": 4, "base_dims": [8, 8], "depth": [1, 1], "heads": [1, 2]},
    ),
    "pvt_v2_b0": (32, EMBED | HEADS),
    "rdnet_tiny": (
        32,
        {
            "num_init_features": 8,
            "growth_rates": (8, 8),
            "num_blocks_list": (2, 2),
            "block_type": ("Block", "BlockESE"),
            "is_downsample_block": (None, True),
        },
    ),
    "repvit_m0_9": (32, {"embed_dim": (8, 8, 16, 16), "depth": (1, 1, 1, 1)}),
    "res2net50_26w_4s": (32, RESNET | {"base_width": 16}),
    "resnest14d": (32, RESNET | {"stem_width": 4}),
    "resnet50d": (32, RESNET | {"stem_width": 4}),
    "resnetblur50": (32, RESNET),
    "resnetv2_50": (32, {"layers": [1, 1, 1, 1], "channels": [16, 16, 32, 32], "stem_chs": 8}),
    "rexnet_100": (32, {"width_mult": 0.2}),
    "sequencer2d_s": (
        32,
        {
            "img_size": 32,
            "layers": (1, 1),
            "patch_sizes": (4, 2),
            "embed_dims": (8, 8),
            "hidden_sizes": (4, 4),
            "mlp_ratios": (2.0, 2.0),
        },
    ),
    "seresnet50": (32, RESNET),
    "shvit_s1": (64, {"embed_dim": (16, 16, 16), "partial_dim": (4, 4, 4), "depth": (1, 1, 1)}),
    "skresnet18": (32, {"layers": [1, 1, 1, 1], "channels": [16, 16, 32, 32]}),
    "starnet_s050": (32, {"base_dim": 8, "depths": (1, 1, 1, 1)}),
    "swiftformer_xs": (64, {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)}),
    "swin_tiny_patch4_window7_224": (32, WINDOWS),
    "swinv2_tiny_window8_256": (32, WINDOWS),
    "swinv2_cr_tiny_224": (32, WINDOWS),
    "test_convnext": (32, {}),
    "test_efficientnet": (32, {}),
    "test_efficientnet_evos": (32, {}),
    "test_efficientnet_gn": (32, {}),
    "test_vit": (32, {}),
    "tiny_vit_5m_224": (
        64,
        {
            "embed_dims": (8, 16, 16, 32),
            "depths": (1, 1, 1, 1),
            "num_heads": (1, 2, 2, 2),
            "window_sizes": (4, 4, 4, 2),
        },
    ),
    "tnt_s_patch16_224": (
        32,
        {"img_size": 32, "embed_dim": 16, "inner_dim": 8, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 2},
    ),
    "twins_pcpvt_small": (64, EMBED | HEADS | {"img_size": 64}),
    "twins_svt_small": (64, EMBED | HEADS | {"img_size": 64, "wss": (4, 4, 2, 2)}),
    "visformer_tiny": (32, {"img_size": 32, "embed_dim": 16, "num_heads": 2, "init_channels": 8}),
    "vit_relpos_small_patch16_224": (16, VIT),
    "vit_small_patch16_rope_224": (16, VIT),
    "xcit_nano_12_p16_224": (32, {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 8}),
}


def named(name: str, options: dict[str, Any]) -> nn.Module:
    return timm.create_model(name, num_classes=CLASSES, **options)


def nf_resnet(**options: Any) -> nn.Module:
    """Without normalisation: weights are standardised at every call."""
    return nfnet.NormFreeNet(nfnet.NfCfg((1, 1, 1, 1), (16, 16, 32, 32), stem_chs=8, **options), num_classes=CLASSES)


def byob(kind: str, **options: Any) -> nn.Module:
    blocks = tuple(byobnet.ByoBlockCfg(type=kind, d=1, c=c, s=2, **options) for c in (8, 16, 16))
    return byobnet.ByobNet(byobnet.ByoModelCfg(blocks=blocks, stem_chs=8, stem_type="3x3"), num_classes=CLASSES)


def maxxvit_of(blocks: tuple[Any, ...], **attention: Any) -> nn.Module:
    conf = maxxvit.MaxxVitTransformerCfg(dim_head=4, window_size=(2, 2), grid_size=(2, 2), **attention)
    dims = (8,) * len(blocks)
    cfg = maxxvit.MaxxVitCfg(dims, (1,) * len(blocks), blocks, 8, transformer_cfg=conf)
    return maxxvit.MaxxVit(cfg, img_size=32, num_classes=CLASSES)


def metaformer_of(*mixers: type[nn.Module], **options: Any) -> nn.Module:
    mixing = list(mixers) if len(mixers) > 1 else mixers[0]
    return metaformer.MetaFormer(num_classes=CLASSES, token_mixers=mixing, **FOUR, **options)


def mixer(**options: Any) -> nn.Module:
    return mlp_mixer.MlpMixer(CLASSES, 16, patch_size=4, num_blocks=2, embed_dim=16, **options)


def hgnet_tiny(lab: bool) -> nn.Module:
    stages = {f"stage{i}": [8 if i == 1 else 16, 8, 16, 1, i > 1, lab, 3, 2] for i in (1, 2, 3, 4)}
    stem = {"stem_type": "v2", "stem_chs": [8, 8]} if lab else {"stem_type": "v1", "stem_chs": [8, 8, 8]}
    return hgnet.HighPerfGpuNet({**stem, **stages}, num_classes=CLASSES, head_hidden_size=16, use_lab=lab)


def vitamin_tiny() -> nn.Module:
    conv = vitamin.VitConvCfg(norm_layer="layernorm2d", norm_eps=1e-6)
    cfg = vitamin.VitCfg(embed_dim=(8, 8, 16), depths=(1, 1, 1), stem_width=8, conv_cfg=conv, head_type="1d")
    sizes = {"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 2.0}
    layers = {"mlp_layer": vitamin.GeGluMlp, "class_token": False, "global_pool": "avg"}
    return timm.create_model("vitamin_small_224", num_classes=CLASSES, embed_cfg=cfg, **sizes, **layers)


def volo_tiny() -> nn.Module:
    sizes = {"embed_dims": [16, 16], "num_heads": [2, 2], "stem_hidden_dim": 8}
    flags = {"downsamples": (True, False), "outlook_attention": (True, False)}
    return volo.VOLO([1, 1], 32, num_classes=CLASSES, patch_size=8, **sizes, **flags)


def gcvit_tiny() -> nn.Module:
    sizes = {"img_size": 64, "embed_dim": 8, "window_size": (4, 4, 4, 2), "layer_scale": 0.1}
    return gcvit.GlobalContextVit(num_classes=CLASSES, **sizes, **FOUR, **HEADS)


def vovnet_tiny(depthwise: bool) -> nn.Module:
    widths = {"stem_chs": [8, 8, 8], "stage_conv_chs": [8] * 4, "stage_out_chs": [16] * 4}
    rest = {
        "layer_per_block": 2,
        "block_per_stage": [1, 2, 1, 1],
        "residual": not depthwise,
        "depthwise": depthwise,
        "attn": "ese",
    }
    return vovnet.VovNet(widths | rest, num_classes=CLASSES)


def ghostnet_tiny(version: str) -> nn.Module:
    return ghostnet.GhostNet([[[3, 16, 16, 0, 1]], [[5, 48, 24, 0.25, 2]]], CLASSES, 0.5, version=version)


def mvit_tiny(**options: Any) -> nn.Module:
    strides = {"stride_q": ((1, 1), (2, 2)), "stride_kv_adaptive": (2, 2)}
    cfg = mvitv2.MultiScaleVitCfg(depths=(1, 2), embed_dim=8, **strides, **options)
    return mvitv2.MultiScaleVit(cfg, img_size=(32, 32), num_classes=CLASSES)


def focalnet_tiny(**options: Any) -> nn.Module:
    return focalnet.FocalNet(num_classes=CLASSES, embed_dim=8, **FOUR, **options)


NORMS = [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2
POST_NORM = {"use_post_norm": True, "use_post_norm_in_modulation": True, "layerscale_value": 1e-4}
GMLP = {"mlp_ratio": 2, "block_layer": mlp_mixer.SpatialGatingBlock, "mlp_layer": GatedMlp}
POOLED = {"dims": (8, 8, 16, 16), "layer_scale_init_values": 1e-5, "use_mlp_head": False}
OWN = [
    entry("nf_resnet", nf_resnet, images(32)),
    entry(
        "nf_regnet",
        partial(nf_resnet, reg=True, group_size=8, attn_layer="se", attn_kwargs={"rd_ratio": 0.5}, num_features=16),
        images(32),
    ),
    entry(
        "nfnet", partial(nf_resnet, extra_conv=True, gamma_in_act=True, same_padding=True, skipinit=True), images(32)
    ),
    entry("repvgg", partial(byob, "rep"), images(32)),
    entry("mobileone", partial(byob, "one"), images(32)),
    entry("gernet_bottle", partial(byob, "bottle", br=0.25), images(32)),
    entry("byob_dark", partial(byob, "dark"), images(32)),
    entry("coatnet", partial(maxxvit_of, ("C", "T")), images(32)),
    entry("maxvit", partial(maxxvit_of, ("M", "M")), images(32)),
    entry("maxvit_rmlp", partial(maxxvit_of, ("M",), rel_pos_type="mlp", rel_pos_dim=16), images(32)),
    entry("poolformer", partial(metaformer_of, metaformer.Pooling, **POOLED), images(32)),
    entry("convformer", partial(metaformer_of, metaformer.SepConv, dims=(8, 8, 16, 16)), images(32)),
    entry(
        "caformer",
        partial(
            metaformer_of,
            *[metaformer.SepConv] * 2,
            *[metaformer.Attention] * 2,
            dims=(8, 8, 32, 32),
            norm_layers=NORMS,
        ),
        images(32),
    ),
    entry("mlp_mixer", mixer, images(16)),
    entry(
        "resmlp", partial(mixer, block_layer=mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine, mlp_ratio=2), images(16)
    ),
    entry("gmlp", partial(mixer, **GMLP), images(16)),
    entry("gmixer", partial(mixer, mlp_ratio=(1.0, 2.0), mlp_layer=GluMlp, act_layer=nn.SiLU), images(16)),
    entry("hgnet", partial(hgnet_tiny, False), images(32)),
    entry("hgnet_v2", partial(hgnet_tiny, True), images(32)),
    entry("vitamin", vitamin_tiny, images(32)),
    entry("volo", volo_tiny, images(32)),
    entry("gcvit", gcvit_tiny, images(64)),
    entry("focalnet", focalnet_tiny, images(32)),
    entry("focalnet_post_norm", partial(focalnet_tiny, **POST_NORM), images(32)),
    entry("convmixer", lambda: convmixer.ConvMixer(16, 2, 3, 4, num_classes=CLASSES), images(16)),
    entry("ghostnet", partial(ghostnet_tiny, "v1"), images(32)),
    entry("ghostnet_v2", partial(ghostnet_tiny, "v2"), images(32)),
    entry("mvit_v2", mvit_tiny, images(32)),
    entry("mvit_v2_token", partial(mvit_tiny, use_cls_token=True), images(32)),
    entry(
        "regnet",
        lambda: regnet.RegNet(regnet.RegNetCfg(6, 8, 24.0, 2.0, 4, 1.0, 0.25), num_classes=CLASSES),
        images(32),
    ),
    entry("vovnet", partial(vovnet_tiny, False), images(32)),
    entry("vovnet_depthwise", partial(vovnet_tiny, True), images(32)),
    entry("nest", lambda: nest.Nest(32, 3, 4, 2, (8, 16), (2, 2), (1, 1), CLASSES), images(32)),
]
ENTRIES: list[Entry] = family(
    "timm",
    [entry(f"timm_{name}", partial(named, name, options), images(size)) for name, (size, options) in NAMED.items()],
)
ENTRIES += family("timm", [entry("timm_" + e.name, e.make, e.sample) for e in OWN])
