"""Models of timm, torchvision, diffusers and peft, and some written out, for the survey."""

from __future__ import annotations

import operator
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from survey_senses import classes, pictures
from survey_text import GROUPED, ROWS, Factory, build, draws, ids, labels
from torch import Tensor, nn

ASIDE = Path(sys.prefix, "survey")


def find_torchvision() -> None:
    """Make torchvision and timm importable from the folder where ``make report NAME=survey`` puts them.

    The torchvision of the package index is built for a torch with CUDA. Beside a torch without, its operators are missing and its import
    fails where it says what shapes they give. Its models need none of them.
    """
    if ASIDE.exists() and str(ASIDE) not in sys.path:
        sys.path.append(str(ASIDE))
        sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")


def seen(size: int) -> tuple[Tensor, Tensor]:
    return pictures(size), classes(5)


def timm(name: str, size: int = 64, **options: Any) -> Factory:
    def make() -> tuple[nn.Module, Any, Any]:
        find_torchvision()
        import timm as library

        torch.manual_seed(0)
        return library.create_model(name, num_classes=5, **options), seen(size), F.cross_entropy

    return make


def torchvision(name: str, size: int = 64, **options: Any) -> Factory:
    def make() -> tuple[nn.Module, Any, Any]:
        find_torchvision()
        from torchvision import models

        torch.manual_seed(0)
        return operator.attrgetter(name)(models)(num_classes=5, **options), seen(size), F.cross_entropy

    return make


def _segmented() -> tuple[nn.Module, Any, Any]:
    find_torchvision()
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    torch.manual_seed(0)
    target = torch.randint(0, 3, (ROWS, 64, 64), generator=draws(8))
    model = lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=3)
    return model, (pictures(64), target), lambda output, target: F.cross_entropy(output["out"], target)


VIT = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 64, "patch_size": 16}
TIMM: dict[str, Factory] = {
    "timm_vit": timm("vit_tiny_patch16_224", **VIT),
    "timm_resnet10t": timm("resnet10t"),
    "timm_convnext": timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    "timm_efficientnet": timm("efficientnet_b0"),
    "timm_mobilenetv3": timm("mobilenetv3_small_050"),
    "timm_swin": timm(
        "swin_tiny_patch4_window7_224",
        img_size=64,
        window_size=4,
        embed_dim=16,
        depths=(1, 1),
        num_heads=(2, 2),
        drop_path_rate=0.0,
    ),
    "timm_xcit": timm("xcit_nano_12_p16_224", img_size=64),
    "timm_deit_distilled": timm("deit_tiny_distilled_patch16_224", **VIT),
    "timm_cait": timm("cait_xxs24_224", embed_dim=32, depth=2, num_heads=4, img_size=64),
    "timm_coat_lite": timm("coat_lite_tiny", img_size=64),
    "timm_regnety": timm("regnety_002"),
    "timm_beit": timm("beit_base_patch16_224", **VIT),
    "timm_edgenext": timm("edgenext_xx_small"),
    "timm_ghostnet": timm("ghostnet_050"),
    "timm_dla": timm("dla46_c"),
}
TORCHVISION: dict[str, Factory] = {
    "tv_resnet18": torchvision("resnet18"),
    "tv_densenet121": torchvision("densenet121"),
    "tv_squeezenet": torchvision("squeezenet1_1"),
    "tv_mobilenet_v2": torchvision("mobilenet_v2"),
    "tv_shufflenet": torchvision("shufflenet_v2_x0_5"),
    "tv_mnasnet": torchvision("mnasnet0_5"),
    "tv_efficientnet_b0": torchvision("efficientnet_b0", stochastic_depth_prob=0.0),
    "tv_regnet_x": torchvision("regnet_x_400mf"),
    "tv_vit": torchvision(
        "vision_transformer.VisionTransformer",
        image_size=64,
        patch_size=16,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=64,
    ),
    "tv_swin": torchvision(
        "swin_transformer.SwinTransformer",
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.0,
    ),
    "tv_lraspp": _segmented,
    "tv_googlenet": torchvision("googlenet", aux_logits=False, init_weights=False),
}


# -- diffusers --------------------------------------------------------------------------------------------------------


def _noised(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output[0] if isinstance(output, tuple) else output.sample, target)


class Placed(nn.Module):
    """A Flux transformer with the places of its pictures and words, which are the same for every row, as buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("img_ids", torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)))
        self.register_buffer("txt_ids", torch.zeros(6, 3))

    def forward(self, **inputs: Tensor) -> Any:
        return self.model(**inputs, img_ids=self.img_ids, txt_ids=self.txt_ids)


def diffused(name: str, options: dict[str, Any], inputs: Any, shape: tuple[int, ...], wrap: Any = None) -> Factory:
    def make() -> tuple[nn.Module, Any, Any]:
        import diffusers

        torch.manual_seed(0)
        model = getattr(diffusers, name)(**options)
        batch = inputs(), torch.randn(shape, generator=draws(11))
        return model if wrap is None else wrap(model), batch, _noised

    return make


def _steps() -> Tensor:
    return torch.tensor([1, 20, 300, 999])


_UNET = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
DIFFUSERS: dict[str, Factory] = {
    "unet_2d": diffused(
        "UNet2DModel",
        _UNET
        | {
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
        },
        lambda: {"sample": pictures(16), "timestep": _steps()},
        (ROWS, 3, 16, 16),
    ),
    "unet_2d_condition": diffused(
        "UNet2DConditionModel",
        _UNET
        | {
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 2,
        },
        lambda: {
            "sample": pictures(16, channels=4),
            "timestep": _steps(),
            "encoder_hidden_states": torch.randn(ROWS, 6, 16, generator=draws(12)),
        },
        (ROWS, 4, 16, 16),
    ),
    "autoencoder_kl": diffused(
        "AutoencoderKL",
        {
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "latent_channels": 4,
        },
        lambda: {"sample": pictures(32)},
        (ROWS, 3, 32, 32),
    ),
    "pixart_transformer": diffused(
        "PixArtTransformer2DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "cross_attention_dim": 32,
            "caption_channels": 16,
            "norm_num_groups": 4,
            "use_additional_conditions": False,
        },
        lambda: {
            "hidden_states": pictures(8, channels=4),
            "encoder_hidden_states": torch.randn(ROWS, 6, 16, generator=draws(12)),
            "timestep": _steps(),
        },
        (ROWS, 4, 8, 8),
    ),
    "sd3_transformer": diffused(
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "joint_attention_dim": 16,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 8,
        },
        lambda: {
            "hidden_states": pictures(8, channels=4),
            "encoder_hidden_states": torch.randn(ROWS, 6, 16, generator=draws(12)),
            "pooled_projections": torch.randn(ROWS, 16, generator=draws(13)),
            "timestep": _steps(),
        },
        (ROWS, 4, 8, 8),
    ),
    "flux_transformer": diffused(
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            "hidden_states": torch.randn(ROWS, 16, 4, generator=draws(12)),
            "encoder_hidden_states": torch.randn(ROWS, 6, 16, generator=draws(12)),
            "pooled_projections": torch.randn(ROWS, 16, generator=draws(13)),
            "timestep": _steps() / 1000,
        },
        (ROWS, 16, 4),
        Placed,
    ),
}


# -- peft -------------------------------------------------------------------------------------------------------------


def adapted(kind: str, **options: Any) -> Factory:
    """A Llama of which an adapter of peft is trained; B starts from draws, so that A has a gradient."""

    def make() -> tuple[nn.Module, Any, Any]:
        import peft

        base = build("LlamaForCausalLM", "LlamaConfig", GROUPED)
        model = peft.get_peft_model(base, getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **options))
        generator = draws(14)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        return model, {"input_ids": ids(), "labels": labels()}, None

    return make


TWO = ["q_proj", "o_proj"]
PEFT: dict[str, Factory] = {
    "peft_lora": adapted("Lora", r=4, target_modules=TWO),
    "peft_dora": adapted("Lora", r=4, target_modules=TWO, use_dora=True),
    "peft_vera": adapted("Vera", r=4, target_modules=TWO),
    "peft_ia3": adapted("IA3", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}
