"""Public networks in small, as their packages define them, each with a loss and a batch of an awkward size.

Weights are random. Packages are imported when a net is built: MONAI, transformers and diffusers (the extra `nets`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.models.zoo import ZOO
from halocline.tracing import tensors_in

Batch = tuple[Tensor, ...]
CLASSES = 3


class Labels(nn.Module):
    """Cross entropy of logits, which may be the first of several outputs, against one label a sample or a place."""

    def forward(self, output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(tensors_in(output)[0], target)


class AllOutputs(nn.Module):
    """Every tensor that the model returns counts, and the gradient differs from place to place."""

    def forward(self, output: Any, target: Tensor) -> Tensor:
        return sum((F.silu(x - target).mean() for x in tensors_in(output)), torch.zeros_like(target))


@dataclass(frozen=True)
class PublicNet:
    """A net, the shape of its input, and what its loss is taken of: `classes`, `places`, `outputs`, or `nothing`.

    `nothing` has no loss: the net is run for its output. `ranks` is how many share a sample in the tests; `slow` nets
    are tested on request only. `dtype` is fp64 where the net can compute in it.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    target: str = "outputs"
    ranks: int = 2
    slow: bool = False
    dtype: torch.dtype = torch.float64

    def make(self, samples: int = 0) -> tuple[nn.Module, nn.Module | None, Batch]:
        """The net, its loss, and a batch, of at least so many samples; always the same."""
        torch.manual_seed(1)
        shape = (max(samples, self.shape[0]), *self.shape[1:])
        model, x = self.build().to(self.dtype), torch.randn(shape, dtype=torch.float64).to(self.dtype)
        target = {
            "classes": lambda: torch.randint(CLASSES, shape[:1]),
            "places": lambda: torch.randint(CLASSES, (shape[0], *shape[2:])),
            "outputs": lambda: torch.tensor(0.1, dtype=self.dtype),
        }
        if self.target == "nothing":
            return model, None, (x,)
        return model, (AllOutputs() if self.target == "outputs" else Labels()), (x, target[self.target]())


def monai(name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import monai.networks.nets

        return getattr(monai.networks.nets, name)(*args, **kwargs)

    return build


def senet(block: str, **kwargs: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from monai.networks.nets import senet

        return senet.SENet(block=getattr(senet, block), dropout_prob=None, num_classes=CLASSES, **kwargs)

    return build


def transformers(name: str, config: str, **kwargs: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(num_labels=CLASSES, **kwargs))

    return build


def upernet(**kwargs: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers as t

        stages = [f"stage{number}" for number in range(1, 5)]
        backbone = t.ConvNextConfig(hidden_sizes=[4, 8, 12, 16], depths=[1, 1, 1, 1], out_features=stages)
        return t.UperNetForSemanticSegmentation(t.UperNetConfig(backbone_config=backbone, num_labels=CLASSES, **kwargs))

    return build


def diffusers(name: str, part: str = "", **kwargs: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**kwargs).get_submodule(part)

    return build


def plane(**kwargs: Any) -> dict[str, Any]:
    """Arguments most of MONAI's nets take."""
    return {"spatial_dims": 2, "in_channels": 1, "out_channels": CLASSES, **kwargs}


KL = {
    "block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4, "latent_channels": 4, "sample_size": 32,
}  # fmt: skip
TINY = {
    "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 2),
    "num_decoder_blocks": (2, 1), "latent_channels": 4,
}  # fmt: skip

MONAI: dict[str, PublicNet] = {
    "UNet 2-D": PublicNet(
        monai("UNet", **plane(channels=(4, 8, 16), strides=(2, 2), num_res_units=2)), (2, 1, 44, 36), "places"
    ),
    "UNet 3-D": PublicNet(
        monai("UNet", **plane(spatial_dims=3, channels=(3, 4, 6), strides=(2, 2), num_res_units=1, norm="batch")),
        (1, 1, 20, 12, 12), "places", ranks=3,
    ),
    "BasicUNet 2-D": PublicNet(monai("BasicUNet", **plane(features=(4, 4, 6, 8, 8, 4))), (1, 1, 53, 37), "places"),
    "BasicUNet 3-D": PublicNet(
        monai("BasicUNet", **plane(spatial_dims=3, features=(2, 2, 3, 4, 4, 2))), (1, 1, 35, 33, 32), "places"
    ),
    "BasicUNetPlusPlus": PublicNet(
        monai("BasicUNetPlusPlus", **plane(features=(3, 4, 4, 6, 6, 3), deep_supervision=True)), (1, 1, 48, 37)
    ),
    "DynUNet 3-D": PublicNet(
        monai("DynUNet", 3, 1, CLASSES, [3, 3, (1, 3, 3)], [1, 2, (1, 2, 2)], [2, (1, 2, 2)], filters=[4, 6, 8],
              res_block=True),
        (1, 1, 18, 12, 16), "places", ranks=3,
    ),
    "DynUNet 2-D, deep supervision": PublicNet(
        monai("DynUNet", 2, 1, CLASSES, [3, 3, 3, 3], [1, 2, 2, 2], [2, 2, 2], filters=[4, 6, 8, 8],
              deep_supervision=True, deep_supr_num=2), (1, 1, 40, 32),
    ),
    "SegResNet": PublicNet(
        monai("SegResNet", **plane(spatial_dims=3, init_filters=8, blocks_down=(1, 2, 2), blocks_up=(1, 1),
                                   dropout_prob=0.2)), (1, 1, 20, 12, 16), "places",
    ),
    "SegResNetDS": PublicNet(
        monai("SegResNetDS", **plane(init_filters=8, blocks_down=(1, 2, 2), dsdepth=2)), (1, 1, 44, 36)
    ),
    "SegResNetVAE": PublicNet(
        monai("SegResNetVAE", (32, 40), **plane(init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1))),
        (1, 1, 32, 40),
    ),
    "VNet": PublicNet(monai("VNet", **plane(dropout_dim=2, dropout_prob_up=(0.0, 0.0))), (1, 1, 48, 32), "places"),
    "AttentionUnet": PublicNet(
        monai("AttentionUnet", **plane(channels=(4, 8, 12), strides=(2, 2))), (1, 1, 44, 36), "places", ranks=3
    ),
    "DenseNet": PublicNet(
        monai("DenseNet", **plane(spatial_dims=3, init_features=6, growth_rate=3, block_config=(2, 2, 2))),
        (2, 1, 37, 33, 29), "classes", ranks=3,
    ),
    "DenseNet121": PublicNet(monai("DenseNet121", **plane()), (2, 1, 65, 33), "classes", slow=True),
    "ResNet, basic blocks": PublicNet(
        monai("ResNet", "basic", [1, 1, 1, 1], (4, 6, 8, 12), spatial_dims=3, n_input_channels=1, num_classes=CLASSES),
        (2, 1, 37, 33, 29), "classes",
    ),
    "ResNet, bottlenecks": PublicNet(
        monai("ResNet", "bottleneck", [1, 2, 1, 1], (4, 6, 8, 12), spatial_dims=2, n_input_channels=1,
              num_classes=CLASSES), (2, 1, 65, 47), "classes", ranks=3,
    ),
    "ResNet, shortcut A": PublicNet(
        monai("ResNet", "basic", [1, 1, 1, 1], (4, 8, 8, 16), spatial_dims=2, n_input_channels=1, num_classes=CLASSES,
              shortcut_type="A"), (2, 1, 65, 47), "classes",
    ),
    "resnet50": PublicNet(
        monai("resnet50", spatial_dims=2, n_input_channels=1, num_classes=CLASSES), (2, 1, 65, 47), "classes",
        slow=True,
    ),
    "EfficientNet-B0": PublicNet(
        monai("EfficientNetBN", "efficientnet-b0", pretrained=False, spatial_dims=2, num_classes=CLASSES),
        (2, 3, 65, 47), "classes", slow=True,
    ),
    "SE-ResNet": PublicNet(
        senet("SEResNetBottleneck", spatial_dims=2, in_channels=3, layers=(1, 1, 1, 1), groups=1, reduction=16),
        (2, 3, 65, 47), "classes", ranks=3, slow=True,
    ),
    "SE-ResNeXt": PublicNet(
        senet("SEResNeXtBottleneck", spatial_dims=2, in_channels=3, layers=(1, 1, 1, 1), groups=32, reduction=16),
        (2, 3, 65, 47), "classes", slow=True,
    ),
    "HighResNet": PublicNet(monai("HighResNet", **plane()), (1, 1, 23, 19), "places"),
    "FlexibleUNet on ResNet-10": PublicNet(
        monai("FlexibleUNet", in_channels=3, out_channels=CLASSES, backbone="resnet10",
              decoder_channels=(8, 8, 8, 4, 4)), (1, 3, 64, 32), "places",
    ),
    "FlexibleUNet on EfficientNet-B0": PublicNet(
        monai("FlexibleUNet", in_channels=3, out_channels=CLASSES, backbone="efficientnet-b0",
              decoder_channels=(8, 8, 8, 4, 4)), (1, 3, 64, 32), "places", slow=True,
    ),
    "RegUNet": PublicNet(monai("RegUNet", **plane(num_channel_initial=4, depth=3)), (1, 1, 40, 32), "places"),
    "LocalNet": PublicNet(
        monai("LocalNet", **plane(num_channel_initial=4, extract_levels=(0, 1, 2))), (1, 1, 40, 32), "places"
    ),
    "HoVerNet": PublicNet(
        monai("HoVerNet", mode="fast", in_channels=3, out_classes=CLASSES), (1, 3, 256, 256), slow=True
    ),
    "QuickNAT": PublicNet(
        monai("Quicknat", num_classes=CLASSES, num_channels=1, num_filters=4, kernel_size=3, se_block="CSE"),
        (1, 1, 48, 32), "places",
    ),
    "MedNeXt": PublicNet(
        monai("MedNeXt", **plane(init_filters=4, blocks_down=(1, 1), blocks_bottleneck=1, blocks_up=(1, 1))),
        (1, 1, 44, 32), "places",
    ),
    "AHNet": PublicNet(
        monai("AHNet", **plane(layers=(1, 1, 1, 1), upsample_mode="bilinear", psp_block_num=2)), (1, 1, 64, 64),
        "places", slow=True,
    ),
    "AutoEncoder": PublicNet(monai("AutoEncoder", **plane(channels=(4, 8), strides=(2, 2))), (1, 1, 40, 28), "places"),
    "PatchDiscriminator": PublicNet(
        monai("PatchDiscriminator", spatial_dims=2, channels=4, in_channels=1, num_layers_d=2), (2, 1, 47, 33)
    ),
    "Discriminator": PublicNet(monai("Discriminator", (1, 40, 28), (4, 8), (2, 2)), (2, 1, 40, 28)),
    "VoxelMorph's U-Net": PublicNet(
        monai("VoxelMorphUNet", spatial_dims=2, in_channels=2, unet_out_channels=8, channels=(4, 4, 6, 6, 8, 8),
              final_conv_channels=(8, 8)), (1, 2, 48, 40),
    ),
    "AutoencoderKL": PublicNet(
        monai("AutoencoderKL", **plane(num_res_blocks=(1, 1), channels=(6, 8), attention_levels=(False, True),
                                       latent_channels=3, norm_num_groups=2)), (1, 1, 38, 30),
    ),
    "VQVAE": PublicNet(  # its quantizer computes in fp32
        monai("VQVAE", **plane(channels=(6, 8), num_res_layers=1, num_res_channels=(6, 8), num_embeddings=8,
                               embedding_dim=4, downsample_parameters=((2, 4, 1, 1),) * 2,
                               upsample_parameters=((2, 4, 1, 1, 0),) * 2)),
        (1, 1, 36, 28), dtype=torch.float32,
    ),
    "UNETR": PublicNet(
        monai("UNETR", 1, CLASSES, (48, 32), feature_size=4, hidden_size=12, mlp_dim=16, num_heads=2, spatial_dims=2),
        (2, 1, 48, 32), "places", slow=True,
    ),
}  # fmt: skip

SMALL = {"hidden_sizes": [8, 12, 16], "depths": [1, 2, 1]}
TRANSFORMERS: dict[str, PublicNet] = {
    "ResNet, basic blocks": PublicNet(
        transformers("ResNetForImageClassification", "ResNetConfig", embedding_size=8, layer_type="basic", **SMALL),
        (2, 3, 65, 47), "classes", ranks=3,
    ),
    "ResNet, bottlenecks": PublicNet(
        transformers("ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16],
                     depths=[1, 2]), (2, 3, 65, 47), "classes",
    ),
    "ConvNeXt": PublicNet(
        transformers("ConvNextForImageClassification", "ConvNextConfig", num_stages=3, **SMALL), (2, 3, 65, 47),
        "classes", ranks=3,
    ),
    "ConvNeXt, stochastic depth": PublicNet(
        transformers("ConvNextForImageClassification", "ConvNextConfig", num_stages=3, drop_path_rate=0.5, **SMALL),
        (4, 3, 65, 47), "classes", slow=True,
    ),
    "ConvNeXt V2": PublicNet(
        transformers("ConvNextV2ForImageClassification", "ConvNextV2Config", num_stages=3, **SMALL), (2, 3, 65, 47),
        "classes",
    ),
    "RegNet": PublicNet(
        transformers("RegNetForImageClassification", "RegNetConfig", embedding_size=8, hidden_sizes=[8, 16],
                     depths=[1, 2], groups_width=4), (2, 3, 65, 47), "classes",
    ),
    "MobileNetV2": PublicNet(
        transformers("MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.25), (2, 3, 65, 47),
        "classes",
    ),
    "MobileNetV2, DeepLab": PublicNet(
        transformers("MobileNetV2ForSemanticSegmentation", "MobileNetV2Config", depth_multiplier=0.25), (2, 3, 65, 47),
        slow=True,
    ),
    "MobileNetV1": PublicNet(
        transformers("MobileNetV1ForImageClassification", "MobileNetV1Config", depth_multiplier=0.25), (2, 3, 65, 47),
        "classes", slow=True,
    ),
    "BiT": PublicNet(
        transformers("BitForImageClassification", "BitConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2],
                     num_groups=4, layer_type="bottleneck", global_padding="SAME"), (2, 3, 65, 47), "classes",
    ),
    "EfficientNet": PublicNet(
        transformers("EfficientNetForImageClassification", "EfficientNetConfig", width_coefficient=0.25,
                     depth_coefficient=0.3, image_size=64, hidden_dim=320), (2, 3, 65, 47), "classes",
    ),
    "PoolFormer": PublicNet(
        transformers("PoolFormerForImageClassification", "PoolFormerConfig", hidden_sizes=[4, 6, 8, 12],
                     depths=[1, 1, 1, 1]), (2, 3, 65, 47), "classes",
    ),
    "SegFormer": PublicNet(
        transformers("SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[4, 8, 8, 8],
                     depths=[1, 1, 1, 1], decoder_hidden_size=8, num_attention_heads=[1, 2, 2, 2]), (2, 3, 65, 47),
    ),
    "UPerNet on ConvNeXt": PublicNet(
        upernet(hidden_size=8, auxiliary_channels=6, auxiliary_in_channels=12, pool_scales=[1, 2, 3]), (2, 3, 65, 47),
    ),
}  # fmt: skip

DIFFUSERS: dict[str, PublicNet] = {
    "AutoencoderKL's encoder": PublicNet(diffusers("AutoencoderKL", "encoder", **KL), (1, 3, 38, 30), "nothing", 3),
    "AutoencoderKL's decoder": PublicNet(diffusers("AutoencoderKL", "decoder", **KL), (1, 4, 19, 15), "nothing", 3),
    "AutoencoderTiny's encoder": PublicNet(diffusers("AutoencoderTiny", "encoder", **TINY), (1, 3, 38, 30), "nothing"),
    "AutoencoderTiny's decoder": PublicNet(diffusers("AutoencoderTiny", "decoder", **TINY), (1, 4, 19, 15), "nothing"),
}

SIZES = {"mesh-tangling-2k": 128, "resnet-small": 33, "resnet50": 64, "resnet50-torch": 64, "mesh-tangling-1k": 64}


@dataclass(frozen=True)
class ZooNet:
    """A net of halocline's own zoo, small."""

    name: str
    ranks: int = 2
    slow: bool = False

    def make(self, samples: int = 0) -> tuple[nn.Module, nn.Module | None, Batch]:
        """As `PublicNet.make`: two samples."""
        torch.manual_seed(1)
        entry, size = ZOO[self.name], SIZES.get(self.name, 32)
        assert entry.batch is not None and entry.loss is not None
        batch = tuple(x.double() if x.is_floating_point() else x for x in entry.batch(size, max(samples, 2), 1))
        return entry.build(size, 0.1).double(), entry.loss(), batch


# The blocks of resnet50 again; small, so many batch norms over eight values each carry rounding up to 1.2e-9.
DEEPER = "resnet152"

PUBLIC: Mapping[str, Mapping[str, PublicNet | ZooNet]] = {
    "MONAI": MONAI,
    "transformers": TRANSFORMERS,
    "diffusers": DIFFUSERS,
    "halocline": {name: ZooNet(name) for name in ZOO if name != DEEPER},
}
