"""Models of images, sound and several of both from transformers for the survey, a line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from survey_text import GROUPED, ROWS, SMALL, VOCABULARY, Factory, draws, ids, labels, mask, model
from torch import Tensor

SIZE = 32
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 8,
    "num_labels": 3,
    "drop_path_rate": 0.0,  # drawn numbers cannot be compared
}
TEXT: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "use_cache"}
SOUND: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
}


def pictures(size: int = SIZE, seed: int = 3, channels: int = 3) -> Tensor:
    return torch.randn(ROWS, channels, size, size, generator=draws(seed))


def waves(length: int = 320) -> Tensor:
    return torch.randn(ROWS, length, generator=draws(4))


def classes(count: int = 3) -> Tensor:
    return torch.arange(ROWS) % count


def images(family: str, base: dict[str, Any] = VISION, size: int = SIZE, **more: Any) -> Factory:
    """``<family>ForImageClassification``."""
    batch = lambda: {"pixel_values": pictures(size), "labels": classes()}  # noqa: E731
    return model(f"{family}ForImageClassification", f"{family}Config", batch, base | more)


def two(family: str, name: str = "Model", **more: Any) -> Factory:
    """A tower for text and one for pictures, with the contrastive loss between them."""
    batch = lambda: {"input_ids": ids(), "attention_mask": mask(), "pixel_values": pictures(), "return_loss": True}  # noqa: E731
    vision = {k: v for k, v in VISION.items() if k not in ("num_labels", "drop_path_rate")}
    options = {
        "text_config": TEXT | {"projection_dim": 16},
        "vision_config": vision | {"projection_dim": 16},
        "projection_dim": 16,
    }
    return model(f"{family}{name}", f"{family}Config", batch, options | more)


def spoken(family: str, **more: Any) -> Factory:
    """``<family>ForCTC`` on waves, with labels of uneven lengths."""
    return model(
        f"{family}ForCTC", f"{family}Config", lambda: {"input_values": waves(), "labels": labels(5, 6)}, SOUND | more
    )


def pictured(tokens: int, image: int = VOCABULARY - 1) -> Callable[[], dict[str, Tensor]]:
    """Text that starts with the places of ``tokens`` picture tokens."""

    def batch() -> dict[str, Tensor]:
        text = ids(vocabulary=VOCABULARY - 4)
        found = torch.cat([torch.full((ROWS, tokens), image), text], 1)
        blank = torch.full((ROWS, tokens), -100)
        return {"input_ids": found, "pixel_values": pictures(), "labels": torch.cat([blank, labels()], 1)}

    return batch


def detected(output: Any) -> Tensor:
    """What a detector says, without the matching of boxes to objects, which is no arithmetic of tensors."""
    return output.logits.logsumexp(-1).mean() + output.pred_boxes.square().mean()


def first(output: Any) -> Tensor:
    return output[0].cos().mean()  # no function of what a norm leaves alone


PLAIN_TEXT = {"model_type": "llama", **GROUPED}
STAGES: dict[str, Any] = {
    "num_labels": 3,
    "drop_path_rate": 0.0,
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 2, 1],
}
BACKBONE: dict[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}

IMAGES: dict[str, Factory] = {
    "vit": images("ViT"),
    "deit": images("DeiT"),
    "beit": images("Beit", use_relative_position_bias=True, use_mask_token=False),
    "dinov2": images("Dinov2", mlp_ratio=2),
    "swin": images(
        "Swin",
        {
            "image_size": SIZE,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 3,
            "drop_path_rate": 0.0,
        },
    ),
    "swinv2": images(
        "Swinv2",
        {
            "image_size": SIZE,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 3,
            "drop_path_rate": 0.0,
        },
    ),
    "convnext": images("ConvNext", STAGES),
    "convnextv2": images("ConvNextV2", STAGES),
    "resnet": images("ResNet", STAGES | {"embedding_size": 8}),
    "regnet": images("RegNet", STAGES | {"embedding_size": 8, "groups_width": 4}),
    "poolformer": images("PoolFormer", STAGES),
    "mobilevit": images(
        "MobileViT",
        {
            "num_labels": 3,
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 48],
            "num_attention_heads": 2,
            "patch_size": 2,
            # of 0.02, positions are so alike that batch norm leaves a bias a gradient of one part in 10**8 of what it adds up, and eager
            # PyTorch alone moves it by 2e-9 of itself where the rows of the batch are given in another order
            "initializer_range": 0.2,
        },
        64,
    ),
    "focalnet": images(
        "FocalNet",
        {
            "num_labels": 3,
            "image_size": SIZE,
            "patch_size": 4,
            "embed_dim": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "drop_path_rate": 0.0,
        },
    ),
    "pvt": images(
        "Pvt",
        {
            "num_labels": 3,
            "image_size": 64,
            "num_encoder_blocks": 4,
            "depths": [1, 1, 1, 1],
            "sequence_reduction_ratios": [8, 4, 2, 1],
            "hidden_sizes": [8, 16, 16, 32],
            "num_attention_heads": [1, 2, 2, 4],
            "mlp_ratios": [2, 2, 2, 2],
            "drop_path_rate": 0.0,
        },
        64,
    ),
    "vit_mae": model(
        "ViTMAEModel",
        "ViTMAEConfig",
        lambda: {"pixel_values": pictures(), "noise": torch.rand(ROWS, 16, generator=draws(7))},
        VISION,
        first,
    ),
    "segformer": model(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        lambda: {"pixel_values": pictures(64), "labels": torch.randint(0, 3, (ROWS, 64, 64), generator=draws(8))},
        {
            "num_labels": 3,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 8, 16, 16],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
            "drop_path_rate": 0.0,
        },
    ),
    "dpt": model(
        "DPTForSemanticSegmentation",
        "DPTConfig",
        lambda: {"pixel_values": pictures(), "labels": torch.randint(0, 3, (ROWS, SIZE, SIZE), generator=draws(8))},
        VISION
        | {
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
            "auxiliary_loss_weight": 0.4,
            "is_hybrid": False,
        },
    ),
    "detr": model(
        "DetrForObjectDetection",
        "DetrConfig",
        lambda: {"pixel_values": pictures(64)},
        {
            "d_model": 32,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_queries": 8,
            "num_labels": 3,
            "backbone_config": BACKBONE,
        },
        detected,
    ),
    "yolos": model(
        "YolosForObjectDetection",
        "YolosConfig",
        lambda: {"pixel_values": pictures()},
        VISION | {"image_size": [SIZE, SIZE], "num_detection_tokens": 8},
        detected,
    ),
}
SOUNDS: dict[str, Factory] = {
    "wav2vec2_ctc": spoken("Wav2Vec2", ctc_zero_infinity=True),
    "hubert_ctc": spoken("Hubert"),
    "wavlm": spoken("WavLM", num_buckets=16, max_bucket_distance=32),
    "sew": model(
        "SEWForCTC",
        "SEWConfig",
        lambda: {"input_values": waves(), "labels": labels(5, 6)},
        SOUND | {"squeeze_factor": 2},
    ),
    "whisper": model(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        lambda: {"input_features": torch.randn(ROWS, 16, 64, generator=draws(9)), "labels": labels(2, 12)},
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "use_cache": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
        },
    ),
    "speecht5": model(
        "SpeechT5ForSpeechToText",
        "SpeechT5Config",
        lambda: {"input_values": waves(), "labels": labels(2, 12)},
        SOUND
        | {
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "use_cache": False,
            "decoder_start_token_id": 2,
        },
    ),
    "audio_spectrogram": model(
        "ASTForAudioClassification",
        "ASTConfig",
        lambda: {"input_values": torch.randn(ROWS, 32, 16, generator=draws(9)), "labels": classes()},
        VISION | {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
    ),
    "speech_to_text": model(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        lambda: {"input_features": torch.randn(ROWS, 32, 16, generator=draws(9)), "labels": labels(2, 12)},
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "input_feat_per_channel": 16,
            "conv_channels": 16,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "use_cache": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
        },
    ),
}
_SEEN = {k: v for k, v in VISION.items() if k not in ("num_labels", "drop_path_rate")}
SEVERAL: dict[str, Factory] = {
    "clip": two("CLIP"),
    "siglip": two("Siglip"),
    "chinese_clip": two("ChineseCLIP"),
    "blip": model(
        "BlipForConditionalGeneration",
        "BlipConfig",
        lambda: {"input_ids": ids(), "pixel_values": pictures(), "labels": labels()},
        {
            "text_config": TEXT | {"is_decoder": True, "encoder_hidden_size": 32, "hidden_size": 32},
            "vision_config": _SEEN,
            "projection_dim": 16,
        },
    ),
    "llava": model(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        pictured(16),
        {
            "text_config": PLAIN_TEXT,
            "vision_config": {"model_type": "clip_vision_model", **_SEEN, "projection_dim": 16},
            "image_token_index": VOCABULARY - 1,
            "image_token_id": VOCABULARY - 1,
            "vision_feature_layer": -1,
        },
    ),
    "paligemma": model(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        lambda: pictured(16)() | {"token_type_ids": torch.cat([torch.zeros(ROWS, 16), torch.ones(ROWS, 16)], 1).long()},
        {
            "text_config": {"model_type": "gemma", **GROUPED, "head_dim": 8},
            "vision_config": {"model_type": "siglip_vision_model", **_SEEN},
            "image_token_index": VOCABULARY - 1,
            "image_token_id": VOCABULARY - 1,
            "projection_dim": 32,
            "hidden_size": 32,
        },
    ),
    "idefics2": model(
        "Idefics2ForConditionalGeneration",
        "Idefics2Config",
        lambda: pictured(4)() | {"pixel_values": pictures()[:, None]},
        {
            "text_config": {"model_type": "mistral", **GROUPED},
            "vision_config": _SEEN,
            "perceiver_config": {
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
                "hidden_size": 32,
            },
            "image_token_id": VOCABULARY - 1,
        },
    ),
    "idefics3": model(
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        lambda: pictured(4)() | {"pixel_values": pictures()[:, None]},
        {"text_config": PLAIN_TEXT, "vision_config": _SEEN, "image_token_id": VOCABULARY - 1, "scale_factor": 2},
    ),
    "vilt": model(
        "ViltForImageAndTextRetrieval",
        "ViltConfig",
        lambda: {
            "input_ids": ids(),
            "attention_mask": mask(),
            "token_type_ids": torch.zeros(ROWS, 16).long(),
            "pixel_values": pictures(),
            "pixel_mask": torch.ones(ROWS, SIZE, SIZE).long(),
        },
        TEXT | VISION,
        first,
    ),
}
