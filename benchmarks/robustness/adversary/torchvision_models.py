"""torchvision: its own classes at tiny sizes, and its building blocks where a whole network cannot be made small."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torchvision import models, ops
from torchvision.models import (
    densenet,
    efficientnet,
    inception,
    mobilenetv3,
    regnet,
    resnet,
    segmentation,
    squeezenet,
    swin_transformer,
    video,
)
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.googlenet import BasicConv2d, Inception
from torchvision.models.video.mvit import MSBlockConfig
from torchvision.models.video.s3d import SepInceptionBlock3D, TemporalSeparableConv

from benchmarks.robustness.adversary.entry import CLASSES, Entry, entry, family, images, rows


class SlimResNet(resnet.ResNet):
    """Every stage an eighth as wide; the stem stays."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        last = [m for m in self.layer4.modules() if isinstance(m, nn.Conv2d)][-1]
        wide = self.layer4[0].downsample[0].out_channels if self.layer4[0].downsample else last.out_channels
        self.fc = nn.Linear(wide, CLASSES)

    def _make_layer(self, block: Any, planes: int, *args: Any, **options: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // 8, *args, **options)


class SlimVideo(video.VideoResNet):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fc = nn.Linear(64, CLASSES)

    def _make_layer(self, block: Any, builder: Any, planes: int, *args: Any, **options: Any) -> nn.Sequential:
        return super()._make_layer(block, builder, planes // 8, *args, **options)


def slim(block: Any = resnet.BasicBlock, **options: Any) -> SlimResNet:
    return SlimResNet(block, [1, 1, 1, 1], **options)


def pooled(*layers: nn.Module, width: int, dims: int = 2) -> nn.Sequential:
    """Layers, the mean over positions, and a linear layer."""
    pool = nn.AdaptiveAvgPool2d(1) if dims == 2 else nn.AdaptiveAvgPool3d(1)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(width, CLASSES))


def vgg(norm: bool) -> nn.Module:
    return pooled(models.vgg.make_layers([8, "M", 16, 16, "M"], batch_norm=norm), width=16)


def mobilenet_v3() -> nn.Module:
    conf = partial(mobilenetv3.InvertedResidualConfig, width_mult=1.0)
    setting = [conf(8, 3, 16, 8, True, "RE", 1, 1), conf(8, 5, 24, 16, True, "HS", 2, 1)]
    return mobilenetv3.MobileNetV3(setting, last_channel=32, num_classes=CLASSES)


def googlenet_blocks() -> nn.Module:
    first, second = Inception(8, 4, 4, 8, 2, 4, 4), Inception(20, 4, 4, 8, 2, 4, 4)
    return pooled(BasicConv2d(3, 8, kernel_size=3), first, nn.MaxPool2d(2), second, width=20)


def inception_blocks() -> nn.Module:
    def thin(kind: Any, channels: int, **options: Any) -> nn.Module:
        return kind(channels, conv_block=ThinConv, **options)

    layers = [inception.BasicConv2d(3, 8, kernel_size=3, stride=2), thin(inception.InceptionA, 8, pool_features=16)]
    layers += [thin(inception.InceptionB, 30), thin(inception.InceptionC, 90, channels_7x7=16)]
    return pooled(*layers, width=96)


class ThinConv(inception.BasicConv2d):
    """Inception's convolution with an eighth of the channels, except for the block's input."""

    def __init__(self, cin: int, cout: int, **options: Any) -> None:
        super().__init__(cin if cin in (8, 30, 90) else max(cin // 8, 1), max(cout // 8, 1), **options)


def squeezenet_blocks() -> nn.Module:
    fires = [squeezenet.Fire(8, 4, 8, 8), nn.MaxPool2d(2, ceil_mode=True), squeezenet.Fire(16, 4, 8, 8)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(True), *fires, nn.Conv2d(16, CLASSES, 1), nn.AdaptiveAvgPool2d(1)
    )


def regnet_tiny(ratio: float | None) -> nn.Module:
    params = regnet.BlockParams.from_init_params(depth=4, w_0=8, w_a=8.0, w_m=2.0, group_width=4, se_ratio=ratio)
    return regnet.RegNet(params, num_classes=CLASSES, stem_width=8)


def efficientnet_v1() -> nn.Module:
    conf = efficientnet.MBConvConfig
    setting = [conf(1, 3, 1, 32, 8, 1, 1.0, 1.0), conf(4, 5, 2, 8, 16, 2, 1.0, 1.0)]
    return efficientnet.EfficientNet(setting, 0.1, num_classes=CLASSES, last_channel=32)


def efficientnet_v2() -> nn.Module:
    setting = [efficientnet.FusedMBConvConfig(2, 3, 2, 8, 8, 2), efficientnet.MBConvConfig(4, 3, 2, 8, 16, 1)]
    return efficientnet.EfficientNet(setting, 0.1, num_classes=CLASSES, last_channel=32)


def swin(**options: Any) -> nn.Module:
    sizes = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
    return swin_transformer.SwinTransformer(**sizes, num_classes=CLASSES, **options)


def swin_v2() -> nn.Module:
    block, merge = swin_transformer.SwinTransformerBlockV2, swin_transformer.PatchMergingV2
    return swin(block=block, downsample_layer=merge)


def mvit(second: bool) -> nn.Module:
    """Version 1, or 2 with relative positions and pooled residuals."""
    conf, three = MSBlockConfig, [3, 3, 3]
    blocks = [
        conf(1, 8, 16, three if second else [], three, [1, 1, 1] if second else [], [1, 2, 2]),
        conf(2, 16, 16, three, three, [1, 2, 2], [1, 1, 1]),
    ]
    return video.MViT((16, 16), 4, blocks, second, False, second, second, num_classes=CLASSES)


def s3d_blocks() -> nn.Module:
    norm = partial(nn.BatchNorm3d, eps=1e-3)
    block = SepInceptionBlock3D(8, 4, 4, 8, 2, 4, 4, norm)
    return pooled(TemporalSeparableConv(3, 8, 3, 1, 1, norm), block, width=20, dims=3)


def backbone(low: bool = False) -> nn.Module:
    layers = {"layer1": "low", "layer4": "high"} if low else {"layer3": "aux", "layer4": "out"}
    return IntermediateLayerGetter(slim(), return_layers=layers)


class Pyramid(nn.Module):
    """A feature pyramid and RetinaNet's classification head on it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = backbone(low=True)
        self.pyramid = ops.FeaturePyramidNetwork([8, 64], 8)
        norm = partial(nn.GroupNorm, 2)
        self.head = models.detection.retinanet.RetinaNetClassificationHead(8, 1, CLASSES, norm_layer=norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(list(self.pyramid(self.body(x)).values()))


def deeplab() -> nn.Module:
    head = nn.Sequential(segmentation.deeplabv3.ASPP(64, [2, 4], out_channels=8), nn.Conv2d(8, CLASSES, 1))
    return segmentation.DeepLabV3(backbone(), head, segmentation.fcn.FCNHead(32, CLASSES))


def over_pixels(out: Any) -> Tensor:
    return (out["out"] if isinstance(out, dict) else out).mean((2, 3))


CLIP = rows(3, 4, 16, 16)
ENTRIES: list[Entry] = family(
    "torchvision",
    [
        entry("resnet18", slim, images(32)),
        entry("resnet50", partial(slim, resnet.Bottleneck), images(32)),
        entry("resnext", partial(slim, resnet.Bottleneck, groups=4, width_per_group=32), images(32)),
        entry("wide_resnet", partial(slim, resnet.Bottleneck, width_per_group=128), images(32)),
        entry("resnet_groupnorm", partial(slim, norm_layer=partial(nn.GroupNorm, 2)), images(32)),
        entry(
            "resnet_dilated",
            partial(slim, resnet.Bottleneck, replace_stride_with_dilation=[False, True, True]),
            images(32),
        ),
        entry("vgg", partial(vgg, False), images(16)),
        entry("vgg_bn", partial(vgg, True), images(16)),
        entry("densenet", partial(densenet.DenseNet, 4, (2, 2), 8, 2, 0.0, CLASSES), images(32)),
        entry("densenet_checkpointed", partial(densenet.DenseNet, 4, (2, 2), 8, 2, 0.0, CLASSES, True), images(32)),
        entry("googlenet_blocks", googlenet_blocks, images(16)),
        entry("inception_v3_blocks", inception_blocks, images(32)),
        entry("mnasnet", partial(models.MNASNet, 0.1, num_classes=CLASSES), images(32)),
        entry("mobilenet_v2", partial(models.MobileNetV2, CLASSES, 0.25, [[1, 16, 1, 1], [6, 24, 2, 2]]), images(32)),
        entry("mobilenet_v3", mobilenet_v3, images(32)),
        entry("shufflenet_v2", partial(models.ShuffleNetV2, [1, 2, 1], [8, 16, 16, 32, 32], CLASSES), images(32)),
        entry("squeezenet_blocks", squeezenet_blocks, images(16)),
        entry("regnet_x", partial(regnet_tiny, None), images(32)),
        entry("regnet_y", partial(regnet_tiny, 0.25), images(32)),
        entry("efficientnet", efficientnet_v1, images(32)),
        entry("efficientnet_v2", efficientnet_v2, images(32)),
        entry(
            "convnext",
            lambda: models.ConvNeXt(
                [models.convnext.CNBlockConfig(8, 16, 1), models.convnext.CNBlockConfig(16, None, 1)],
                num_classes=CLASSES,
            ),
            images(32),
        ),
        entry("swin", swin, images(32)),
        entry("swin_v2", swin_v2, images(32)),
        entry("vit", partial(models.VisionTransformer, 16, 4, 2, 2, 16, 32, num_classes=CLASSES), images(16)),
        entry(
            "vit_conv_stem",
            lambda: models.VisionTransformer(
                16,
                4,
                1,
                2,
                16,
                32,
                num_classes=CLASSES,
                representation_size=12,
                conv_stem_configs=[models.vision_transformer.ConvStemConfig(8, 3, 4)],
            ),
            images(16),
        ),
        entry(
            "maxvit", lambda: models.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, 0.0, num_classes=CLASSES), images(32)
        ),
        entry(
            "r3d",
            lambda: SlimVideo(
                video.resnet.BasicBlock, [video.resnet.Conv3DSimple] * 4, [1] * 4, video.resnet.BasicStem
            ),
            CLIP,
        ),
        entry(
            "mc3",
            lambda: SlimVideo(
                video.resnet.BasicBlock,
                [video.resnet.Conv3DSimple] + [video.resnet.Conv3DNoTemporal] * 3,
                [1] * 4,
                video.resnet.BasicStem,
            ),
            CLIP,
        ),
        entry(
            "r2plus1d",
            lambda: SlimVideo(
                video.resnet.BasicBlock, [video.resnet.Conv2Plus1D] * 4, [1] * 4, video.resnet.R2Plus1dStem
            ),
            CLIP,
        ),
        entry("mvit_v1", partial(mvit, False), CLIP),
        entry("mvit_v2", partial(mvit, True), CLIP),
        entry(
            "swin3d",
            lambda: video.SwinTransformer3d([2, 4, 4], 8, [2, 2], [2, 2], [2, 2, 2], num_classes=CLASSES),
            CLIP,
        ),
        entry("s3d_blocks", s3d_blocks, CLIP),
        entry(
            "fcn", lambda: segmentation.FCN(backbone(), segmentation.fcn.FCNHead(64, CLASSES)), images(32), over_pixels
        ),
        entry("deeplabv3", deeplab, images(32), over_pixels),
        entry("lraspp", lambda: segmentation.LRASPP(backbone(low=True), 8, 64, CLASSES, 8), images(32), over_pixels),
        entry("retinanet_head", Pyramid, images(32), lambda out: out.mean(1)),
        entry("mlp_block", lambda: ops.MLP(6, [16, 8, CLASSES], norm_layer=nn.LayerNorm, dropout=0.1), rows(6)),
        entry("frozen_batchnorm", partial(slim, norm_layer=ops.FrozenBatchNorm2d), images(32)),
    ],
)
