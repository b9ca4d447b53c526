"""The further survey: ``MODELS`` by name, those of ``survey_packages`` and of packages with a few models each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from survey_models import Entry
from survey_packages import (
    QUANTIZERS,
    SEGMENTATION,
    TOKENS,
    VIT_PYTORCH,
    WIDTH,
    X_TRANSFORMERS,
    Wrapped,
    classifier,
    floats,
    language,
    made,
    of,
    part,
    squared,
    tokens,
)
from survey_senses import classes, pictures
from survey_text import ROWS, Factory, draws
from torch import Tensor, nn

SMALL: dict[str, Any] = {"num_tokens": TOKENS, "dim": 32, "depth": 2, "heads": 4}


def lit(name: str, **options: Any) -> Factory:
    base: dict[str, Any] = {
        "name": "",
        "block_size": 32,
        "vocab_size": TOKENS,
        "padded_vocab_size": TOKENS,
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
    }

    def call(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), target.flatten())

    return made(
        lambda: Wrapped(of(f"litgpt.{name}:GPT")(of(f"litgpt.{name}:Config")(**(base | options))), call),
        lambda: (tokens(), tokens(seed=5)),
        None,
    )


LLAMA: dict[str, Any] = {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 64,
    "bias": False,
    "parallel_residual": False,
    "rotary_percentage": 1.0,
}
LITGPT: dict[str, Factory] = {
    "lit_pythia": lit("model"),
    "lit_llama": lit("model", n_query_groups=2, **LLAMA),
    "lit_gemma": lit("model", **(LLAMA | {"mlp_class_name": "GemmaMLP", "scale_embeddings": True})),
    "lit_mixtral": lit("model", **(LLAMA | {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2})),
    "lit_lora": lit("lora", lora_r=4, lora_alpha=8, lora_dropout=0.0, lora_query=True, lora_value=True, **LLAMA),
    "lit_adapter": lit("adapter", adapter_prompt_length=4, adapter_start_layer=0, **LLAMA),
}


def molecule(call: Any, make: Any, *batch: tuple[int, ...]) -> Factory:
    return made(
        lambda: Wrapped(make(), call), lambda: tuple(floats(*shape, seed=3 + i) for i, shape in enumerate(batch)), None
    )


def _pair_distances(model: Any, features: Tensor, places: Tensor) -> Tensor:
    found, moved = model(features, places)
    return found.square().mean() + moved.square().mean()


E3: dict[str, Factory] = {
    "e3_fully_connected": molecule(
        lambda m, x, y: m(x, y).square().mean(),
        lambda: of("e3nn.o3:FullyConnectedTensorProduct")("4x0e+2x1o", "2x0e+1x1o", "4x0e+2x1o"),
        (10,),
        (5,),
    ),
    "e3_linear": molecule(
        lambda m, x: m(x).square().mean(), lambda: of("e3nn.o3:Linear")("4x0e+2x1o", "8x0e+3x1o"), (10,)
    ),
    "e3_spherical": molecule(
        lambda m, x, w: m[1](m[0](w) + of("e3nn.o3:spherical_harmonics")("0e+1o+2e", x, True)).square().mean(),
        lambda: nn.ModuleList(
            (of("e3nn.o3:Linear")("0e+1o+2e", "0e+1o+2e"), of("e3nn.o3:Linear")("0e+1o+2e", "4x1o+3x0e"))
        ),
        (3,),
        (9,),
    ),
    "e3_gate": molecule(
        lambda m, x: m[1](m[0](x)).square().mean(),
        lambda: nn.ModuleList(
            (
                of("e3nn.o3:Linear")("4x0e+2x1o", "8x0e+2x1o"),
                of("e3nn.nn:Gate")("6x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o"),
            ),
        ),
        (10,),
    ),
    "e3_batch_norm": molecule(
        lambda m, x: m[1](m[0](x)).pow(3).mean(),
        lambda: nn.ModuleList((of("e3nn.o3:Linear")("4x0e+2x1o", "4x0e+2x1o"), of("e3nn.nn:BatchNorm")("4x0e+2x1o"))),
        (10,),
    ),
    "e3_weights": molecule(
        lambda m, x, y, r: m[0](x, y, m[1](r)).square().mean(),
        lambda: nn.ModuleList(
            (
                of("e3nn.o3:FullyConnectedTensorProduct")(
                    "4x0e+2x1o", "0e+1o", "4x0e+2x1o", shared_weights=False, internal_weights=False
                ),
                of("e3nn.nn:FullyConnectedNet")([4, 16, 36], torch.tanh),
            ),
        ),
        (10,),
        (4,),
        (4,),
    ),
}

MOLECULES: dict[str, Factory] = {
    "egnn": molecule(_pair_distances, lambda: of("egnn_pytorch:EGNN")(dim=16, m_dim=8), (6, 16), (6, 3)),
    "egnn_network": molecule(
        _pair_distances,
        lambda: of("egnn_pytorch:EGNN_Network")(dim=16, depth=2, m_dim=8, norm_coors=True),
        (6, 16),
        (6, 3),
    ),
}


def denoiser(name: str, *shape: int, **options: Any) -> Factory:
    return made(
        lambda: Wrapped(
            of(f"denoising_diffusion_pytorch.{name}")(**options), lambda m, x, t, target: F.mse_loss(m(x, t), target)
        ),
        lambda: (floats(*shape), torch.rand(ROWS, generator=draws(9)), floats(*shape, seed=6)),
        None,
    )


DIFFUSION: dict[str, Factory] = {
    "ddp_unet": denoiser(
        "denoising_diffusion_pytorch:Unet", 3, 16, 16, dim=8, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2
    ),
    "ddp_unet_1d": denoiser(
        "denoising_diffusion_pytorch_1d:Unet1D", 3, 32, dim=8, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2
    ),
    "ddp_karras": denoiser(
        "karras_unet:KarrasUnet",
        4,
        16,
        16,
        image_size=16,
        dim=8,
        dim_max=16,
        num_downsamples=1,
        num_blocks_per_stage=1,
        attn_res=(8,),
        attn_dim_head=8,
        dropout=0.0,
    ),
    "ddp_uvit": denoiser(
        "simple_diffusion:UViT", 3, 16, 16, dim=8, dim_mults=(1, 2), vit_depth=1, vit_dropout=0.0, attn_dim_head=8
    ),
    "ddp_gaussian": made(
        lambda: of("denoising_diffusion_pytorch.denoising_diffusion_pytorch:GaussianDiffusion")(
            of("denoising_diffusion_pytorch.denoising_diffusion_pytorch:Unet")(dim=8, dim_mults=(1, 2)),
            image_size=16,
            timesteps=10,
        ),
        lambda: torch.rand(ROWS, 3, 16, 16, generator=draws(3)),
        None,
    ),
}

LONG: dict[str, Factory] = {
    "performer": language(
        "performer_pytorch:PerformerLM", auto_check_redraw=False, max_seq_len=16, dim_head=8, nb_features=16, **SMALL
    ),
    "performer_generalized": language(
        "performer_pytorch:PerformerLM", max_seq_len=16, dim_head=8, generalized_attention=True, nb_features=16, **SMALL
    ),
    "linear_attention": language(
        "linear_attention_transformer:LinearAttentionTransformerLM", max_seq_len=16, causal=False, **SMALL
    ),
    "linear_attention_causal": language(
        "linear_attention_transformer:LinearAttentionTransformerLM",
        max_seq_len=16,
        causal=True,
        blindspot_size=4,
        **SMALL,
    ),
    "linformer": language("linformer:LinformerLM", seq_len=16, k=8, **SMALL),
    "nystromformer": part(
        lambda: of("nystrom_attention:Nystromformer")(dim=32, depth=1, dim_head=8, heads=4, num_landmarks=4)
    ),
    "routing_transformer": made(
        lambda: Wrapped(
            of("routing_transformer:RoutingTransformerLM")(max_seq_len=16, window_size=8, causal=True, **SMALL),
            lambda m, x, y: F.cross_entropy(m(x)[0].flatten(0, 1), y.flatten()) + m(x)[1].sum(),
        ),
        lambda: (tokens(), tokens(seed=5)),
        None,
    ),
    "local_transformer": language(
        "local_attention:LocalTransformer", max_seq_len=16, local_attn_window_size=8, dim_head=8, **SMALL
    ),
    "h_transformer": language("h_transformer_1d:HTransformer1D", max_seq_len=16, block_size=4, dim_head=8, **SMALL),
    "perceiver_lm": made(
        lambda: Wrapped(
            of("perceiver_pytorch.perceiver_io:PerceiverLM")(
                num_tokens=TOKENS,
                dim=32,
                depth=1,
                max_seq_len=16,
                num_latents=8,
                latent_dim=32,
                latent_heads=2,
                latent_dim_head=8,
            ),
            lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
        ),
        lambda: (tokens(), tokens(seed=5)),
        None,
    ),
    "perceiver": made(
        lambda: of("perceiver_pytorch:Perceiver")(
            num_freq_bands=4,
            depth=2,
            max_freq=10.0,
            num_latents=8,
            latent_dim=32,
            latent_heads=2,
            latent_dim_head=8,
            cross_dim_head=8,
            num_classes=5,
            weight_tie_layers=True,
        ),
        lambda: (floats(8, 8, 3), classes(5)),
        F.cross_entropy,
    ),
    "gmlp": language("g_mlp_pytorch:gMLP", num_tokens=TOKENS, dim=32, depth=2, seq_len=16, causal=True),
    "isab": part(lambda: of("isab_pytorch:ISAB")(dim=32, heads=4, num_latents=4)),
    "axial_image": made(
        lambda: of("axial_attention:AxialImageTransformer")(
            dim=16, depth=1, heads=2, reversible=False, axial_pos_emb_shape=(8, 8)
        ),
        lambda: (floats(16, 8, 8), floats(16, 8, 8, seed=6)),
        squared,
    ),
    "axial_attention": made(
        lambda: of("axial_attention:AxialAttention")(dim=16, dim_index=1, heads=2, num_dimensions=2),
        lambda: (floats(16, 8, 8), floats(16, 8, 8, seed=6)),
        squared,
    ),
}

MIXTURES: dict[str, Factory] = {
    "moe": part(lambda: of("mixture_of_experts:MoE")(dim=32, num_experts=4, second_policy_train="all")),
    "st_moe": part(lambda: of("st_moe_pytorch:MoE")(dim=32, num_experts=4, is_distributed=False)),
    "soft_moe": part(lambda: of("soft_moe_pytorch:SoftMoE")(dim=32, seq_len=16, num_experts=4, is_distributed=False)),
    "product_key_memory": part(lambda: of("product_key_memory:PKM")(dim=32, heads=2, num_keys=8, topk=4, dim_head=16)),
    "colt5": part(
        lambda: of("colt5_attention:ConditionalRoutedTransformerBlock")(
            32,
            num_heavy_attn_tokens_q=4,
            num_heavy_attn_tokens_kv=4,
            num_heavy_ff_tokens=4,
            light_dim_head=8,
            light_heads=2,
            light_window_size=8,
            heavy_dim_head=8,
            heavy_heads=2,
        )
    ),
    "slot_attention": part(lambda: of("slot_attention:SlotAttention")(num_slots=4, dim=32)),
}

PICTURES: dict[str, Factory] = {
    "mlp_mixer": classifier(
        "mlp_mixer_pytorch:MLPMixer", image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=5
    ),
    "gmlp_vision": classifier("g_mlp_pytorch:gMLPVision", image_size=32, patch_size=8, num_classes=5, dim=32, depth=2),
    "glom": made(
        lambda: Wrapped(
            of("glom_pytorch:Glom")(dim=16, levels=3, image_size=16, patch_size=4),
            lambda m, x: m(x, iters=2).square().mean(),
        ),
        lambda: pictures(16),
        None,
    ),
    "lambda_layer": made(
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 1), of("lambda_networks:LambdaLayer")(16, dim_k=4, r=5, heads=2, dim_out=16)
        ),
        lambda: (pictures(8), floats(16, 8, 8)),
        squared,
    ),
    "timesformer": made(
        lambda: of("timesformer_pytorch:TimeSformer")(
            dim=32, num_frames=2, num_classes=5, image_size=16, patch_size=8, depth=1, heads=2, dim_head=16
        ),
        lambda: (floats(2, 3, 16, 16), classes(5)),
        F.cross_entropy,
    ),
    "efficientnet": made(
        lambda: of("efficientnet_pytorch:EfficientNet").from_name(
            "efficientnet-b0", num_classes=5, drop_connect_rate=0.0, dropout_rate=0.0
        ),
        lambda: (pictures(32), classes(5)),
        F.cross_entropy,
    ),
}


def _numbers() -> tuple[Tensor, Tensor]:
    return floats(6), floats(1, seed=6)


def table(make: Any, call: Any) -> Factory:
    return made(
        lambda: Wrapped(make(), call),
        lambda: (torch.randint(0, 4, (ROWS, 3), generator=draws(4)), floats(6), floats(1, seed=6)),
        None,
    )


TABLES: dict[str, Factory] = {
    "ft_transformer": table(
        lambda: of("tab_transformer_pytorch:FTTransformer")(
            categories=(4, 4, 4), num_continuous=6, dim=16, depth=2, heads=2, dim_head=8
        ),
        lambda m, c, n, y: F.mse_loss(m(c, n), y),
    ),
    "rtdl_ft_transformer": table(
        lambda: of("rtdl_revisiting_models:FTTransformer")(
            n_cont_features=6,
            cat_cardinalities=[4, 4, 4],
            d_out=1,
            n_blocks=2,
            d_block=16,
            attention_n_heads=2,
            attention_dropout=0.0,
            ffn_d_hidden_multiplier=2,
            ffn_dropout=0.0,
            residual_dropout=0.0,
        ),
        lambda m, c, n, y: F.mse_loss(m(n, c), y),
    ),
    "rtdl_mlp": made(
        lambda: of("rtdl_revisiting_models:MLP")(d_in=6, d_out=1, n_blocks=2, d_block=16, dropout=0.0),
        _numbers,
        squared,
    ),
    "rtdl_resnet": made(
        lambda: of("rtdl_revisiting_models:ResNet")(
            d_in=6, d_out=1, n_blocks=2, d_block=16, d_hidden_multiplier=2.0, dropout1=0.0, dropout2=0.0
        ),
        _numbers,
        squared,
    ),
    "rtdl_periodic": made(
        lambda: nn.Sequential(
            of("rtdl_num_embeddings:PeriodicEmbeddings")(6, 8, n_frequencies=4, lite=False),
            nn.Flatten(),
            nn.Linear(48, 1),
        ),
        _numbers,
        squared,
    ),
    "rtdl_piecewise": made(
        lambda: nn.Sequential(
            of("rtdl_num_embeddings:PiecewiseLinearEmbeddings")(
                [torch.linspace(-2, 2, 4 + i) for i in range(6)], 8, activation=True, version="B"
            ),
            nn.Flatten(),
            nn.Linear(48, 1),
        ),
        _numbers,
        squared,
    ),
}

SOUND: dict[str, Factory] = {
    "conformer": part(lambda: of("conformer:Conformer")(32, depth=2, dim_head=8, heads=4, conv_kernel_size=5)),
    "tcn": made(
        lambda: of("pytorch_tcn:TCN")(num_inputs=4, num_channels=[8, 8], kernel_size=3, dropout=0.0),
        lambda: (floats(4, 32), floats(8, 32, seed=6)),
        squared,
    ),
    "tcn_gated": made(
        lambda: of("pytorch_tcn:TCN")(
            num_inputs=4,
            num_channels=[8, 8],
            kernel_size=3,
            dropout=0.0,
            use_gate=True,
            use_skip_connections=True,
            use_norm="layer_norm",
        ),
        lambda: (floats(4, 32), floats(8, 32, seed=6)),
        squared,
    ),
    "mel_spectrogram": made(
        lambda: nn.Sequential(
            of("nnAudio.features:MelSpectrogram")(
                sr=800, n_fft=64, n_mels=8, hop_length=16, trainable_mel=True, trainable_STFT=True, verbose=False
            ),
            nn.Flatten(),
            nn.Linear(168, 5),
        ),
        lambda: (floats(320), classes(5)),
        F.cross_entropy,
    ),
}


class Flow(nn.Module):
    """A neural ordinary differential equation over a fixed grid."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.field = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 5, dtype=x.dtype)
        found: Tensor = of("torchdiffeq:odeint")(lambda t, y: self.field(y) * (1 + t), x, times, method=self.method)
        return found[-1]


OTHERS: dict[str, Factory] = {
    "ode_rk4": made(lambda: Flow("rk4"), lambda: (floats(8), floats(8, seed=6)), squared),
    "ode_dopri5": made(lambda: Flow("dopri5"), lambda: (floats(8), floats(8, seed=6)), squared),
    "crf": made(
        lambda: Wrapped(
            nn.ModuleList((nn.Embedding(TOKENS, 16), nn.Linear(16, 5), of("torchcrf:CRF")(5, batch_first=True))),
            lambda m, x, y: -m[2](m[1](m[0](x)), y, reduction="mean"),
        ),
        lambda: (tokens(), tokens(seed=5) % 5),
        None,
    ),
    "entmax": part(
        lambda: Wrapped(nn.Linear(WIDTH, WIDTH), lambda m, x: of("entmax:entmax15")(m(x), dim=-1) @ m.weight)
    ),
    "sparsemax": part(
        lambda: Wrapped(nn.Linear(WIDTH, WIDTH), lambda m, x: of("entmax:sparsemax")(m(x), dim=-1) @ m.weight)
    ),
    "rotary": part(
        lambda: Wrapped(
            nn.ModuleList((nn.Linear(WIDTH, WIDTH), of("rotary_embedding_torch:RotaryEmbedding")(dim=8))),
            lambda m, x: (
                m[1].rotate_queries_or_keys(m[0](x).unflatten(-1, (4, 8)).transpose(1, 2)).transpose(1, 2).flatten(2)
            ),
        )
    ),
    "istft": made(
        lambda: Wrapped(
            nn.Linear(64, 64),
            lambda m, x: (
                torch.istft(
                    torch.stft(m(x), 16, 4, window=torch.ones(16, dtype=x.dtype), return_complex=True) * 2,
                    16,
                    4,
                    window=torch.ones(16, dtype=x.dtype),
                    length=64,
                )
                .pow(3)
                .mean()
            ),
        ),
        lambda: floats(64),
        None,
    ),
    "fake_quantize": made(
        lambda: Wrapped(
            nn.Linear(16, 8),
            lambda m, x: (
                F.linear(x, torch.fake_quantize_per_tensor_affine(m.weight, 0.01, 0, -128, 127), m.bias).square().mean()
            ),
        ),
        lambda: floats(16),
        None,
    ),
}

GROUPS: dict[str, dict[str, Factory]] = {
    "vit-pytorch": VIT_PYTORCH,
    "x-transformers": X_TRANSFORMERS,
    "vector-quantize-pytorch": QUANTIZERS,
    "segmentation-models-pytorch": SEGMENTATION,
    "litgpt": LITGPT,
    "e3nn": E3,
    "molecules, genomes": MOLECULES,
    "denoising-diffusion-pytorch": DIFFUSION,
    "long sequences": LONG,
    "mixtures": MIXTURES,
    "pictures": PICTURES,
    "tables": TABLES,
    "sound": SOUND,
    "others": OTHERS,
}
MODELS: dict[str, Entry] = {name: Entry(group, make) for group, of_it in GROUPS.items() for name, make in of_it.items()}
