"""Lists the models of the zoo: configurations of transformers or of modules in ``zoo.modules``, with the published size and its source.

Dropout is off in all of them: large models train without it, and a plan hardly depends on it. To plan with dropout, pass a configuration
file instead of a name.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import ModelError

_GPT2_PAPER = "github.com/openai/gpt-2, README"
_LLAMA3_PAPER = "arXiv:2407.21783, table 3"
_T5_PAPER = "arXiv:1910.10683, section 3.7"
_VIT_PAPER = "arXiv:2010.11929, table 1"
_BERT_TABLE = "transformers documentation, pretrained models"


@dataclass(frozen=True, slots=True)
class ZooModel:
    """An entry of the zoo: ``parameters`` is the published count, ``seq`` and ``global_batch`` the published (or usual) training setting.

    ``seq`` is in tokens, 0 for models without sequences; ``global_batch`` in sequences or images. ``config`` is the content of the model's
    ``config.json``, or has a ``"module"`` (the name of a class in ``zoo.modules``) and the arguments of that class.
    """

    name: str
    kind: str
    parameters: float
    source: str
    seq: int
    global_batch: int
    config: dict[str, Any]


_BLOCKS = dict.fromkeys(
    ("bert", "deepseek_v2", "deepseek_v3", "llama", "mixtral", "qwen3", "qwen3_moe", "vit"), "num_hidden_layers"
) | {"gpt2": "n_layer"}
"""The field with the number of blocks, for the types of models of this catalogue whose blocks are equal."""


def few_blocks(name: str) -> tuple[ZooModel, int, int] | None:
    """Return a model of the catalogue with few blocks, the number of the block to repeat, and how often (``capture.deepen``), or ``None``
    if its blocks differ. The first blocks without experts differ from the others."""
    entry = find(name)
    if (count := _BLOCKS.get(entry.config.get("model_type", ""))) is None:
        return None
    first = entry.config.get("first_k_dense_replace", 0)
    few = first + 3  # the first of the equal blocks, the repeated one, the last
    more = entry.config[count] - few
    return (replace(entry, config=entry.config | {count: few}), first + 1, more) if more > 0 else None


def _gpt2(width: int, layers: int, heads: int, positions: int = 1024, vocabulary: int = 50257) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": vocabulary,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _llama3(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }


def _bert(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _t5(layers: int, heads: int, head: int, inner: int) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 1024,
        "d_kv": head,
        "d_ff": inner,
        "num_layers": layers,
        "num_heads": heads,
        "vocab_size": 32128,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
    }


def _vit(width: int, layers: int, patch: int) -> dict[str, Any]:
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "intermediate_size": 4 * width,
        "image_size": 224,
        "patch_size": patch,
        "num_labels": 1000,
    }


_QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def _qwen3_moe(width: int, inner: int, inner_of_experts: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": width,
        "intermediate_size": inner,
        "moe_intermediate_size": inner_of_experts,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }


def _deepseek_v3(
    heads: int, experts: int, groups: int, dense_layers: int, scale: float, vocabulary: int
) -> dict[str, Any]:
    """Return the configuration of a model with DeepSeek-V3's layers; a token's experts are in half of the ``groups``, or anywhere."""
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": groups,
        "topk_group": max(groups // 2, 1),
        "norm_topk_prob": True,
        "routed_scaling_factor": scale,
        "first_k_dense_replace": dense_layers,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


_RESNET50 = {
    "model_type": "resnet",
    "architectures": ["ResNetForImageClassification"],
    "num_labels": 1000,
}
_UNET = {"module": "UNet", "channels": 64, "depth": 4, "num_labels": 2, "image_size": 512}
_DIT_XL2 = {
    "module": "DiT",
    "hidden_size": 1152,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "image_size": 32,  # height and width of the latents of a 256 x 256 image
    "patch_size": 2,
    "num_labels": 1000,
}
_ENCODER = {
    "module": "EncoderLM",
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 37000,
    "positions": 1024,
}
_LSTM = {"module": "LSTMLM", "hidden_size": 1500, "num_layers": 2, "vocab_size": 10000}
_TWO_TOWER = {"module": "TwoTower", "num_embeddings": 1024 * 1024, "embedding_size": 64, "layer_sizes": [128, 64]}

CATALOGUE: tuple[ZooModel, ...] = (
    ZooModel("gpt2", "language model", 124e6, _GPT2_PAPER, 1024, 512, _gpt2(768, 12, 12)),
    ZooModel("gpt2-medium", "language model", 355e6, _GPT2_PAPER, 1024, 512, _gpt2(1024, 24, 16)),
    ZooModel("gpt2-large", "language model", 774e6, _GPT2_PAPER, 1024, 512, _gpt2(1280, 36, 20)),
    ZooModel("gpt2-xl", "language model", 1558e6, _GPT2_PAPER, 1024, 512, _gpt2(1600, 48, 25)),
    ZooModel(
        "gpt3-175b", "language model", 175.0e9, "arXiv:2005.14165, table 2.1", 2048, 1536, _gpt2(12288, 96, 96, 2048)
    ),
    ZooModel(
        "gpt-1t",
        "language model",
        1008.0e9,
        "arXiv:2104.04473, table 1",
        2048,
        3072,
        _gpt2(25600, 128, 160, 2048, 51200),
    ),
    ZooModel("llama3-8b", "language model", 8.03e9, _LLAMA3_PAPER, 8192, 512, _llama3(4096, 14336, 32, 32)),
    ZooModel("llama3-70b", "language model", 70.6e9, _LLAMA3_PAPER, 8192, 1024, _llama3(8192, 28672, 80, 64)),
    ZooModel("llama3-405b", "language model", 405e9, _LLAMA3_PAPER, 8192, 2048, _llama3(16384, 53248, 126, 128)),
    ZooModel("qwen3-8b", "language model", 8.2e9, "arXiv:2505.09388, table 1", 4096, 1024, _QWEN3_8B),
    ZooModel("mixtral-8x7b", "mixture of experts", 46.7e9, "arXiv:2401.04088", 4096, 1024, _MIXTRAL_8X7B),
    ZooModel(
        "qwen3-30b-a3b",
        "mixture of experts",
        30.5e9,
        "arXiv:2505.09388, table 2",
        4096,
        1024,
        _qwen3_moe(2048, 6144, 768, 48, 32),
    ),
    ZooModel(
        "deepseek-v2-lite", "mixture of experts", 15.7e9, "arXiv:2405.04434, appendix B", 4096, 1024, _DEEPSEEK_V2_LITE
    ),
    ZooModel(
        "deepseek-v3",
        "mixture of experts",
        671.0e9,
        "arXiv:2412.19437, section 4.2",
        4096,
        15360,
        _deepseek_v3(128, 256, 8, 3, 2.5, 129280),
    ),
    ZooModel(
        "kimi-k2",
        "mixture of experts",
        1.026e12,
        "arXiv:2507.20534, table 2",
        4096,
        16384,
        _deepseek_v3(64, 384, 1, 1, 2.827, 163840),
    ),
    ZooModel(
        "qwen3-235b-a22b",
        "mixture of experts",
        235.1e9,
        "arXiv:2505.09388, table 2",
        4096,
        4096,
        _qwen3_moe(4096, 12288, 1536, 94, 64),
    ),
    ZooModel("gpt-oss-120b", "mixture of experts", 116.8e9, "arXiv:2508.10925, table 1", 4096, 1024, _GPT_OSS_120B),
    ZooModel("bert-base", "masked language model", 110e6, _BERT_TABLE, 512, 256, _bert(768, 12, 12)),
    ZooModel("bert-large", "masked language model", 336e6, _BERT_TABLE, 512, 256, _bert(1024, 24, 16)),
    ZooModel("t5-large", "sequence to sequence", 738e6, _T5_PAPER, 512, 128, _t5(24, 16, 64, 4096)),
    ZooModel("t5-3b", "sequence to sequence", 2.85e9, _T5_PAPER, 512, 128, _t5(24, 32, 128, 16384)),
    ZooModel("t5-11b", "sequence to sequence", 11.3e9, _T5_PAPER, 512, 128, _t5(24, 128, 128, 65536)),
    ZooModel("vit-large", "image classifier", 304e6, _VIT_PAPER, 0, 4096, _vit(1024, 24, 16)),
    ZooModel("vit-huge", "image classifier", 632e6, _VIT_PAPER, 0, 4096, _vit(1280, 32, 14)),
    ZooModel("resnet50", "image classifier", 25.6e6, "the published checkpoint (v1.5)", 0, 256, _RESNET50),
    ZooModel("unet", "image segmentation", 31.0e6, "arXiv:1505.04597, figure 1", 0, 64, _UNET),
    ZooModel("dit-xl-2", "diffusion transformer", 675e6, "arXiv:2212.09748, table 1", 0, 256, _DIT_XL2),
    ZooModel("transformer-encoder", "language model", 152e6, "arXiv:1706.03762, table 3 (big)", 512, 64, _ENCODER),
    ZooModel("lstm-large", "language model", 66.0e6, "arXiv:1409.2329, section 4.1 (large)", 35, 20, _LSTM),
    ZooModel("two-tower", "retrieval", 134.3e6, "torchrec, examples/retrieval", 0, 4096, _TWO_TOWER),
)


def find(name: str) -> ZooModel:
    """Return the entry called ``name``.

    Raises:
        ModelError: there is none; the hint has the nearest names.
    """
    for entry in CATALOGUE:
        if entry.name == name:
            return entry
    near = difflib.get_close_matches(name, [entry.name for entry in CATALOGUE], n=3, cutoff=0.5)
    raise ModelError(
        f"there is no model called {name!r} in the zoo",
        f"did you mean {' or '.join(near)}?"
        if near
        else "`autopar help models` lists the zoo; a model of your own is "
        "file.py:factory, package.module:factory or a transformers config.json",
    )
