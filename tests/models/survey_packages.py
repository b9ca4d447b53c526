"""Models of packages that the survey lacks, a line each: vit-pytorch, x-transformers, vector-quantize-pytorch,
segmentation-models-pytorch. ``survey_further`` has the others and the names of all.

The packages are in a folder of their own beside the environment, because some ask for another torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from survey_senses import classes, pictures
from survey_text import ROWS, Factory, draws
from torch import Tensor, nn

PLACE = Path(sys.prefix, "survey-further")
TOKENS, LENGTH, WIDTH = 96, 16, 32


def find_packages() -> None:
    """Make the packages importable, torchvision among them (see ``survey_other.find_torchvision``)."""
    if PLACE.exists() and str(PLACE) not in sys.path:
        sys.path.append(str(PLACE))
    sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))


def of(name: str) -> Any:
    """``"package.module:Class"``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def floats(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(ROWS, *shape, generator=draws(seed))


def tokens(length: int = LENGTH, seed: int = 4) -> Tensor:
    return torch.randint(0, TOKENS, (ROWS, length), generator=draws(seed))


class Wrapped(nn.Module):
    """A model behind a function of it and the batch, where its call is not just ``model(batch)``, or its result no tensor."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.model, *inputs)


class Headed(nn.Module):
    """A linear layer before and after a part that keeps the width, whose result may be a tuple that starts with a tensor and may have a
    scalar loss."""

    def __init__(self, part: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(width, width), part, nn.Linear(width, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.part(self.first(x))
        first, *rest = found if isinstance(found, tuple | list) else (found,)
        extra = [item.sum() for item in rest if isinstance(item, Tensor) and item.is_floating_point()]
        return self.last(first).mean(1), torch.stack(extra).sum() if extra else first.sum() * 0


def headed_loss(found: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(found[0], target) + 0.1 * found[1]


def as_language(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def squared(found: Any, target: Tensor) -> Tensor:
    return F.mse_loss(found, target)


def made(make: Callable[[], nn.Module], batch: Callable[[], Any], loss_fn: Callable[..., Any] | None) -> Factory:
    def factory() -> tuple[nn.Module, Any, Any]:
        find_packages()
        torch.manual_seed(0)
        return make(), batch(), loss_fn

    return factory


def classifier(name: str, size: int = 32, **options: Any) -> Factory:
    return made(lambda: of(name)(**options), lambda: (pictures(size), classes(5)), F.cross_entropy)


def vit(name: str, size: int = 32, **options: Any) -> Factory:
    base = {"image_size": size, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64, "patch_size": 8}
    return classifier(f"vit_pytorch.{name}", size, **{k: v for k, v in (base | options).items() if v is not None})


def language(name: str, **options: Any) -> Factory:
    return made(lambda: of(name)(**options), lambda: (tokens(), tokens(seed=5)), as_language)


def part(make: Callable[[], nn.Module], length: int = LENGTH) -> Factory:
    return made(lambda: Headed(make()), lambda: (floats(length, WIDTH), classes(5)), headed_loss)


HEAD: dict[str, Any] = {"dim_head": 8}
VIT_PYTORCH: dict[str, Factory] = {
    "vp_vit": vit("vit:ViT", **HEAD),
    "vp_simple_vit": vit("simple_vit:SimpleViT", **HEAD),
    "vp_deepvit": vit("deepvit:DeepViT", **HEAD),
    "vp_cait": vit("cait:CaiT", cls_depth=2, **HEAD),
    "vp_xcit": vit("xcit:XCiT", cls_depth=2, **HEAD),
    "vp_rvt": vit("rvt:RvT", **HEAD),
    "vp_parallel_vit": vit("parallel_vit:ViT", **HEAD),
    "vp_small_dataset": vit("vit_for_small_dataset:ViT", **HEAD),
    "vp_patch_merger": vit("vit_with_patch_merger:ViT", patch_merge_layer=1, patch_merge_num_tokens=4, **HEAD),
    "vp_registers": vit("simple_vit_with_register_tokens:SimpleViT", **HEAD),
    "vp_hyper_connections": vit("simple_vit_with_hyper_connections:SimpleViT", num_residual_streams=2, **HEAD),
    "vp_value_residual": vit("simple_vit_with_value_residual:SimpleViT", **HEAD),
    "vp_fft": vit("simple_vit_with_fft:SimpleViT", freq_patch_size=8, **HEAD),
    "vp_uvit": vit("simple_uvit:SimpleUViT", **HEAD),
    "vp_normalized": vit("normalized_vit:nViT", **HEAD),
    "vp_jumbo": vit("jumbo_vit:JumboViT", **HEAD),
    "vp_pit": vit("pit:PiT", depth=(1, 1), **HEAD),
    "vp_levit": classifier(
        "vit_pytorch.levit:LeViT",
        64,
        image_size=64,
        num_classes=5,
        dim=(16, 24, 32),
        depth=1,
        heads=(2, 2, 2),
        mlp_mult=2,
        dim_key=8,
        dim_value=8,
    ),
    "vp_cvt": classifier(
        "vit_pytorch.cvt:CvT",
        64,
        num_classes=5,
        s1_emb_dim=8,
        s2_emb_dim=16,
        s2_heads=2,
        s2_depth=1,
        s3_emb_dim=24,
        s3_heads=2,
        s3_depth=1,
    ),
    "vp_twins": classifier(
        "vit_pytorch.twins_svt:TwinsSVT",
        56,
        num_classes=5,
        s1_emb_dim=8,
        s2_emb_dim=16,
        s3_emb_dim=24,
        s4_emb_dim=32,
        s1_local_patch_size=7,
        s2_local_patch_size=7,
        s3_local_patch_size=7,
        s4_local_patch_size=1,
        s1_global_k=7,
        s2_global_k=7,
        s3_global_k=7,
        s4_global_k=1,
        s3_depth=1,
        s4_depth=1,
        s1_patch_size=2,
        s2_patch_size=2,
        s3_patch_size=2,
        s4_patch_size=1,
    ),
    "vp_scalable": classifier(
        "vit_pytorch.scalable_vit:ScalableViT",
        64,
        num_classes=5,
        dim=16,
        depth=(1, 1),
        heads=(2, 2),
        reduction_factor=(4, 2),
        window_size=(8, None),
        iwsa_dim_key=8,
        iwsa_dim_value=8,
        ssa_dim_key=8,
        ssa_dim_value=8,
    ),
    "vp_sep": classifier(
        "vit_pytorch.sep_vit:SepViT", 56, num_classes=5, dim=16, depth=(1, 1), heads=(2, 2), window_size=7, dim_head=8
    ),
    "vp_maxvit": classifier(
        "vit_pytorch.max_vit:MaxViT", 64, num_classes=5, dim=16, depth=(1, 1), window_size=4, dim_head=8, dropout=0.0
    ),
    "vp_nest": classifier(
        "vit_pytorch.nest:NesT",
        32,
        image_size=32,
        patch_size=4,
        num_classes=5,
        dim=16,
        heads=2,
        num_hierarchies=2,
        block_repeats=(1, 1),
        dim_head=8,
    ),
    "vp_mobilevit": classifier(
        "vit_pytorch.mobile_vit:MobileViT",
        64,
        image_size=(64, 64),
        dims=[16, 24, 32],
        num_classes=5,
        channels=[8, 8, 16, 16, 16, 16, 24, 24, 32, 32, 48],
        depths=(1, 1, 1),
    ),
    "vp_cct": made(
        lambda: of("vit_pytorch.cct:CCT")(
            img_size=32,
            embedding_dim=32,
            n_conv_layers=1,
            num_layers=2,
            num_heads=4,
            mlp_ratio=2.0,
            num_classes=5,
            positional_embedding="learnable",
            attention_dropout=0.0,
            stochastic_depth_rate=0.0,
        ),
        lambda: (pictures(32), classes(5)),
        F.cross_entropy,
    ),
    "vp_regionvit": classifier(
        "vit_pytorch.regionvit:RegionViT", 56, num_classes=5, dim=(8, 16, 24, 32), depth=(1, 1, 1, 1), window_size=7
    ),
    "vp_crossvit": classifier(
        "vit_pytorch.cross_vit:CrossViT",
        48,
        image_size=48,
        num_classes=5,
        sm_dim=16,
        lg_dim=24,
        sm_enc_heads=2,
        sm_enc_mlp_dim=32,
        sm_enc_dim_head=8,
        lg_enc_depth=1,
        lg_enc_heads=2,
        lg_enc_mlp_dim=32,
        lg_enc_dim_head=8,
        cross_attn_depth=1,
        cross_attn_heads=2,
        cross_attn_dim_head=8,
        depth=1,
        dropout=0.0,
    ),
    "vp_t2t": vit("t2t:T2TViT", size=64, patch_size=None, **HEAD),
    "vp_vivit": made(
        lambda: of("vit_pytorch.vivit:ViViT")(
            image_size=16,
            image_patch_size=8,
            frames=4,
            frame_patch_size=2,
            num_classes=5,
            dim=32,
            spatial_depth=1,
            temporal_depth=1,
            heads=4,
            mlp_dim=64,
            dim_head=8,
        ),
        lambda: (floats(3, 4, 16, 16), classes(5)),
        F.cross_entropy,
    ),
}


def x_decoder(kind: str = "Decoder", **options: Any) -> Factory:
    return made(
        lambda: of("x_transformers:TransformerWrapper")(
            num_tokens=TOKENS,
            max_seq_len=32,
            attn_layers=of(f"x_transformers:{kind}")(dim=32, depth=2, heads=4, attn_dim_head=8, **options),
        ),
        lambda: (tokens(), tokens(seed=5)),
        as_language,
    )


X_TRANSFORMERS: dict[str, Factory] = {
    "xt_decoder": x_decoder(),
    "xt_encoder": x_decoder("Encoder"),
    "xt_alibi": x_decoder(alibi_pos_bias=True, alibi_num_heads=4),
    "xt_rotary": x_decoder(rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, ff_swish=True),
    "xt_rel_pos": x_decoder(rel_pos_bias=True),
    "xt_dynamic_pos": x_decoder(dynamic_pos_bias=True, dynamic_pos_bias_log_distance=False),
    "xt_talking_heads": x_decoder(attn_pre_talking_heads=True, attn_post_talking_heads=True),
    "xt_qk_norm": x_decoder(attn_qk_norm=True, attn_qk_norm_scale=10),
    "xt_macaron": x_decoder("Encoder", macaron=True, sandwich_norm=True),
    "xt_residual_attn": x_decoder(residual_attn=True, shift_tokens=1),
    "xt_gated": x_decoder(gate_residual=True, attn_gate_values=True),
    "xt_memory": x_decoder("Encoder", attn_num_mem_kv=4),
    "xt_hyper": x_decoder(num_residual_streams=2),
    "xt_one_kv": x_decoder(attn_one_kv_head=True, attn_head_scale=True),
    "xt_sparse_topk": x_decoder(attn_sparse_topk=4),
    "xt_continuous": made(
        lambda: of("x_transformers:ContinuousTransformerWrapper")(
            dim_in=8, dim_out=5, max_seq_len=32, attn_layers=of("x_transformers:Encoder")(dim=32, depth=2, heads=4)
        ),
        lambda: (floats(LENGTH, 8), floats(LENGTH, 5, seed=6)),
        squared,
    ),
    "xt_vit": made(
        lambda: of("x_transformers:ViTransformerWrapper")(
            image_size=32,
            patch_size=8,
            num_classes=5,
            attn_layers=of("x_transformers:Encoder")(dim=32, depth=2, heads=4),
        ),
        lambda: (pictures(32), classes(5)),
        F.cross_entropy,
    ),
    "xt_pair": made(
        lambda: of("x_transformers:XTransformer")(
            dim=32,
            enc_num_tokens=TOKENS,
            enc_depth=1,
            enc_heads=4,
            enc_max_seq_len=32,
            dec_num_tokens=TOKENS,
            dec_depth=1,
            dec_heads=4,
            dec_max_seq_len=32,
            tie_token_emb=True,
        ),
        lambda: (tokens(), tokens(seed=5)),
        None,
    ),
}

VQ = "vector_quantize_pytorch:"
QUANTIZERS: dict[str, Factory] = {
    "vq_plain": part(lambda: of(VQ + "VectorQuantize")(dim=32, codebook_size=16)),
    "vq_learned": part(
        lambda: of(VQ + "VectorQuantize")(dim=32, codebook_size=16, learnable_codebook=True, ema_update=False)
    ),
    "vq_cosine": part(lambda: of(VQ + "VectorQuantize")(dim=32, codebook_size=16, use_cosine_sim=True)),
    "vq_fsq": part(lambda: of(VQ + "FSQ")([8, 5, 5], dim=32)),
    "vq_lfq": part(lambda: of(VQ + "LFQ")(codebook_size=16, dim=32)),
    "vq_residual": part(lambda: of(VQ + "ResidualVQ")(dim=32, num_quantizers=2, codebook_size=16)),
    "vq_residual_fsq": part(lambda: of(VQ + "ResidualFSQ")(dim=32, levels=[8, 5, 5], num_quantizers=2)),
    "vq_sim": part(lambda: of(VQ + "SimVQ")(dim=32, codebook_size=16)),
    "vq_random_projection": made(
        lambda: Wrapped(
            nn.ModuleList(
                (
                    of(VQ + "RandomProjectionQuantizer")(dim=32, num_codebooks=2, codebook_dim=8, codebook_size=16),
                    nn.Linear(32, 2 * 16),
                )
            ),
            lambda m, x: F.cross_entropy(m[1](x).reshape(-1, 16), m[0](x).reshape(-1)),
        ),
        lambda: floats(LENGTH, 32),
        None,
    ),
}


def segmented(name: str, size: int = 64, **options: Any) -> Factory:
    base = {"encoder_name": "tu-mobilenetv3_small_050", "encoder_weights": None, "classes": 3}
    return made(
        lambda: of(f"segmentation_models_pytorch:{name}")(**(base | options)),
        lambda: (pictures(size), torch.randint(0, 3, (ROWS, size, size), generator=draws(8))),
        F.cross_entropy,
    )


CHANNELS: dict[str, Any] = {"decoder_channels": (32, 24, 16, 16, 8)}
SEGMENTATION: dict[str, Factory] = {
    "smp_unet": segmented("Unet", **CHANNELS),
    "smp_unet_scse": segmented("Unet", decoder_attention_type="scse", decoder_channels=(32, 32, 16, 16, 16)),
    "smp_unetplusplus": segmented("UnetPlusPlus", **CHANNELS),
    "smp_manet": segmented("MAnet", decoder_pab_channels=16, **CHANNELS),
    "smp_linknet": segmented("Linknet"),
    "smp_fpn": segmented("FPN", decoder_pyramid_channels=32, decoder_segmentation_channels=32, decoder_dropout=0.0),
    "smp_pspnet": segmented("PSPNet", psp_out_channels=16, psp_dropout=0.0),
    "smp_deeplabv3": segmented("DeepLabV3", decoder_channels=16),
    "smp_deeplabv3plus": segmented("DeepLabV3Plus", decoder_channels=16),
    "smp_pan": segmented("PAN", 128, decoder_channels=16),
    "smp_upernet": segmented("UPerNet", decoder_channels=16),
    "smp_segformer": segmented("Segformer", decoder_segmentation_channels=16),
}
