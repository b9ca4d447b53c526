"""Language models of transformers for the survey, a line each: tiny configurations of the classes that transformers ships.

A factory gives the model, its batch and its ``loss_fn`` (``None``: the model returns its loss).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS, SEQUENCE, VOCABULARY = 4, 16, 96

Factory = Callable[[], tuple[nn.Module, Any, Any]]

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BOTH: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "use_cache": False,
}


def draws(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(seed: int = 1, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY, rows: int = ROWS) -> Tensor:
    """Tokens that are none of the special ones."""
    return torch.randint(3, vocabulary, (rows, sequence), generator=draws(seed))


def labels(seed: int = 2, sequence: int = SEQUENCE) -> Tensor:
    """Labels of which some are masked, unevenly over the rows."""
    found = ids(seed, sequence)
    found[0, :5] = -100
    found[2, 3:6] = -100
    return found


def mask(sequence: int = SEQUENCE) -> Tensor:
    """One where a position is a token, zero where it is padding, unevenly over the rows."""
    lengths = torch.tensor([sequence, sequence - 3, sequence, sequence - 5])
    return (torch.arange(sequence) < lengths[:, None]).long()


def build(name: str, config: str, options: dict[str, Any]) -> nn.Module:
    """A transformers model by the names of its class and its configuration's."""
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**options))


def model(name: str, config: str, batch: Callable[[], Any], options: dict[str, Any], loss_fn: Any = None) -> Factory:
    return lambda: (build(name, config, options), batch(), loss_fn)


def decoder(family: str, base: dict[str, Any] = GROUPED, **more: Any) -> Factory:
    """``<family>ForCausalLM`` on masked labels."""
    return causal(f"{family}ForCausalLM", f"{family}Config", base, **more)


def causal(name: str, config: str, base: dict[str, Any] = GROUPED, **more: Any) -> Factory:
    return model(name, config, lambda: {"input_ids": ids(), "labels": labels()}, base | more)


def encoder(family: str, base: dict[str, Any] = SMALL, task: str = "MaskedLM", **more: Any) -> Factory:
    """``<family>ForMaskedLM`` with a padding mask and masked labels."""
    return model(f"{family}For{task}", f"{family}Config", padded, base | more)


def padded() -> dict[str, Tensor]:
    return {"input_ids": ids(), "attention_mask": mask(), "labels": labels()}


def pair(name: str, config: str, base: dict[str, Any] = BOTH, **more: Any) -> Factory:
    """An encoder and a decoder: a padded source, labels of another length."""
    batch = lambda: {"input_ids": ids(), "attention_mask": mask(), "labels": labels(2, 12)}  # noqa: E731
    return model(name, config, batch, base | more)


def seq2seq(family: str, base: dict[str, Any] = BOTH, **more: Any) -> Factory:
    return pair(f"{family}ForConditionalGeneration", f"{family}Config", base, **more)


def classifier(family: str, base: dict[str, Any] = SMALL, **more: Any) -> Factory:
    """``<family>ForSequenceClassification`` on padded rows."""
    batch = lambda: {"input_ids": ids(), "attention_mask": mask(), "labels": torch.tensor([0, 2, 1, 2])}  # noqa: E731
    options = base | {"num_labels": 3} | more
    return model(f"{family}ForSequenceClassification", f"{family}Config", batch, options)


LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 32,
    "head_dim": 8,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
}

DECODERS: dict[str, Factory] = {
    "llama": decoder("Llama"),
    "mistral": decoder("Mistral", sliding_window=8),
    "gpt2": causal("GPT2LMHeadModel", "GPT2Config", SMALL),
    "gpt_neo": decoder(
        "GPTNeo", SMALL, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8
    ),
    "gpt_neox": decoder("GPTNeoX", SMALL),
    "gptj": decoder("GPTJ", SMALL, rotary_dim=4),
    "gpt_bigcode": decoder("GPTBigCode", SMALL),
    "codegen": decoder("CodeGen", SMALL, rotary_dim=4),
    "mpt": decoder("Mpt", SMALL, d_model=32, n_heads=4, n_layers=2, max_seq_len=64, expansion_ratio=2),
    "bloom": decoder("Bloom", SMALL),
    "opt": decoder("OPT", SMALL, ffn_dim=64, word_embed_proj_dim=32),
    "falcon": decoder("Falcon", SMALL),
    "phi": decoder("Phi"),
    "phi3": decoder("Phi3"),
    "stablelm": decoder("StableLm"),
    "persimmon": decoder("Persimmon", SMALL),
    "qwen2": decoder("Qwen2"),
    "qwen3": decoder("Qwen3", head_dim=8),
    "gemma": decoder("Gemma", head_dim=8),
    "gemma2": decoder("Gemma2", head_dim=8, sliding_window=8),
    "gemma3": causal("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=8),
    "olmo": decoder("Olmo"),
    "olmo2": decoder("Olmo2"),
    "cohere": decoder("Cohere"),
    "cohere2": decoder("Cohere2", sliding_window=8),
    "granite": decoder("Granite"),
    "starcoder2": decoder("Starcoder2"),
    "glm": decoder("Glm", head_dim=8),
    "nemotron": decoder("Nemotron"),
    "helium": decoder("Helium", head_dim=8),
    "smollm3": decoder("SmolLM3"),
    "biogpt": decoder("BioGpt", SMALL),
    "ctrl": causal("CTRLLMHeadModel", "CTRLConfig", SMALL, dff=64),
    "openai_gpt": causal("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", SMALL),
}
MIXTURES: dict[str, Factory] = {
    "mixtral": decoder("Mixtral", EXPERTS),
    "qwen2_moe": decoder("Qwen2Moe", EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": decoder("Qwen3Moe", EXPERTS, head_dim=8),
    "olmoe": decoder("Olmoe", EXPERTS),
    "deepseek_v2": decoder("DeepseekV2", SMALL | LATENT),
    "deepseek_v3": decoder("DeepseekV3", SMALL | LATENT),
    "dbrx": decoder(
        "Dbrx",
        SMALL,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    ),
    "phimoe": decoder("Phimoe", EXPERTS),
    "granitemoe": decoder("GraniteMoe", EXPERTS),
    "gpt_oss": decoder("GptOss", EXPERTS, head_dim=8, sliding_window=8),
    "qwen3_next": decoder("Qwen3Next", EXPERTS | LINEAR),
    "jamba": decoder(
        "Jamba",
        EXPERTS,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
}
RECURRENT: dict[str, Factory] = {
    "mamba": decoder("Mamba", SMALL, state_size=8, time_step_rank=4),
    "mamba2": decoder("Mamba2", SMALL, state_size=8, num_heads=4, head_dim=16, n_groups=1, expand=2, chunk_size=8),
    "falcon_mamba": decoder("FalconMamba", SMALL, state_size=8, time_step_rank=4),
    "rwkv": decoder("Rwkv", SMALL, attention_hidden_size=32, context_length=64),
    "recurrent_gemma": decoder(
        "RecurrentGemma",
        SMALL,
        lru_width=32,
        attention_window_size=8,
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=8,
    ),
    "xlstm": decoder("xLSTM", SMALL, num_heads=4, chunk_size=8),
}
ENCODERS: dict[str, Factory] = {
    "bert": encoder("Bert"),
    "roberta": encoder("Roberta"),
    "electra": encoder("Electra", embedding_size=32),
    "deberta": encoder("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False),
    "deberta_v2": encoder(
        "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8, share_att_key=True
    ),
    "albert": encoder("Albert", embedding_size=16, num_hidden_groups=1),
    "distilbert": encoder("DistilBert", SMALL, dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    "mpnet": encoder("MPNet"),
    "xlnet": causal(
        "XLNetLMHeadModel", "XLNetConfig", {"vocab_size": VOCABULARY}, d_model=32, n_layer=2, n_head=4, d_inner=64
    ),
    "longformer": encoder("Longformer", attention_window=8),
    "big_bird": encoder("BigBird", attention_type="original_full"),
    "big_bird_sparse": model(
        "BigBirdForMaskedLM",
        "BigBirdConfig",
        lambda: {"input_ids": ids(sequence=64), "labels": labels(2, 64)},
        SMALL | {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2},
    ),
    "funnel": encoder(
        "Funnel",
        {k: v for k, v in SMALL.items() if k not in ("num_hidden_layers", "use_cache")},
        block_sizes=[1, 1],
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        num_decoder_layers=1,
    ),
    "reformer": causal(
        "ReformerModelWithLMHead",
        "ReformerConfig",
        SMALL,
        is_decoder=True,
        attn_layers=["local", "local"],
        axial_pos_embds=False,
        attention_head_size=8,
        local_attn_chunk_length=8,
        feed_forward_size=64,
        hash_seed=0,
    ),
    "fnet": model(
        "FNetForMaskedLM",
        "FNetConfig",
        lambda: {"input_ids": ids(), "labels": labels()},
        SMALL | {"type_vocab_size": 2, "tpu_short_seq_length": 16},
    ),
    "convbert": encoder("ConvBert", embedding_size=32, conv_kernel_size=3),
    "modernbert": encoder("ModernBert", global_attn_every_n_layers=2, local_attention=8),
    "roformer": encoder("RoFormer", embedding_size=32),
    "squeezebert": encoder("SqueezeBert", embedding_size=32),
    "nystromformer": encoder("Nystromformer", segment_means_seq_len=16, num_landmarks=16),
    "esm": encoder("Esm", mask_token_id=3, position_embedding_type="rotary"),
    "bert_classifier": classifier("Bert"),
}
PAIRS: dict[str, Factory] = {
    "t5": seq2seq("T5", T5, decoder_start_token_id=0),
    "mt5": seq2seq("MT5", T5, decoder_start_token_id=0),
    "switch_transformers": seq2seq(
        "SwitchTransformers", T5, decoder_start_token_id=0, num_experts=4, expert_capacity=16, router_jitter_noise=0.0
    ),
    "longt5": seq2seq("LongT5", T5, decoder_start_token_id=0, local_radius=4),
    "bart": seq2seq("Bart"),
    "mbart": seq2seq("MBart"),
    "pegasus": seq2seq("Pegasus"),
    "m2m_100": seq2seq("M2M100"),
    "blenderbot": seq2seq("Blenderbot"),
    "marian": pair("MarianMTModel", "MarianConfig"),
    "led": seq2seq("LED", attention_window=8, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64),
    "plbart": seq2seq("PLBart"),
}
