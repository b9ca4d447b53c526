"""The zoo has the sizes that it claims, on the meta device, with batches that give a loss."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture
from autopar.errors import BatchError, ModelError
from autopar.shard import annotate
from autopar.verify import shrink_config
from autopar.zoo import CATALOGUE, build, find, models
from autopar.zoo.hf import build_config

pytest.importorskip("transformers")


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def all_entries():
    return [pytest.param(entry, id=entry.name) for entry in CATALOGUE]


@pytest.mark.parametrize("entry", all_entries())
def test_size_is_the_published_one_and_takes_no_memory(entry):
    module, batch = build(entry.name, global_batch=2)
    assert count(module) == pytest.approx(entry.parameters, rel=0.01)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert all(tensor.device.type == "meta" and tensor.shape[0] == 2 for tensor in batch.values())
    assert "labels" in batch


def test_models_lists_each_once():
    assert len(set(models())) == len(models())
    required = (
        "gpt2 gpt2-xl gpt3-175b gpt-1t llama3-8b llama3-70b llama3-405b mixtral-8x7b bert-large t5-large vit-large"
    )
    assert set(required.split()) | {"resnet50", "unet", "dit-xl-2", "vit-huge", "t5-3b", "t5-11b"} <= set(models())


def test_tied_embeddings_stay_tied():
    module, _ = build("gpt2")
    assert module.lm_head.weight is module.transformer.wte.weight


def test_tables_keep_their_values():
    module, _ = build("llama3-8b")
    table = module.model.rotary_emb.inv_freq
    assert table.device.type == "cpu" and table[0] == 1.0
    assert table[-1].item() == pytest.approx(500000.0 ** (-126 / 128), rel=1e-5)


def test_dropout_is_off():
    for name in ("gpt2", "bert-base", "t5-large", "vit-large"):
        module, _ = build(name, global_batch=1)
        assert all(m.p == 0 for m in module.modules() if isinstance(m, torch.nn.Dropout)), name


TINY = {
    "causal": {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
               "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 31},
    "masked": {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 16, "num_hidden_layers": 1,
               "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 31},
    "seq2seq": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 16, "d_kv": 8,
                "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 31, "decoder_start_token_id": 0},
    "image": {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "embedding_size": 8,
              "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5},
}  # fmt: skip


@pytest.mark.parametrize("kind", TINY)
def test_a_configuration_builds_a_model_whose_batch_gives_a_finite_loss(kind):
    module, batch = build_config(TINY[kind], 8, 2, "float32", "cpu")
    loss = module(**batch).loss
    assert loss.shape == () and torch.isfinite(loss)
    loss.backward()


PLAIN = [entry for entry in CATALOGUE if "module" in entry.config]


@pytest.mark.parametrize("entry", PLAIN, ids=lambda entry: entry.name)
def test_a_module_of_ours_shrinks_to_a_finite_loss(entry):
    module, batch = build_config(shrink_config(entry.config), 8, 2, "float32", "cpu")
    loss = module(**batch)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    assert loss.shape == () and torch.isfinite(loss)
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["unet", "two-tower", "lstm-large", "transformer-encoder"])
def test_a_published_size_is_captured(name):
    module, batch = build(name)
    graph = annotate(capture(module, batch, name=name))
    assert graph.batch_size == find(name).global_batch and graph.replicated == ()
    assert sum(p.value.numel for p in graph.parameters.values()) == count(module)


def test_modules_of_ours_refuse_what_does_not_fit():
    config = find("transformer-encoder").config
    with pytest.raises(BatchError, match="1024 learned positions"):
        build_config(config, 2048, 2)
    with pytest.raises(BatchError, match="is empty"):
        build_config(config, 16, 0)
    with pytest.raises(ModelError, match="no module 'VNet'"):
        build_config({"module": "VNet"}, 16, 2)
    with pytest.raises(ModelError, match="does not fit the module LSTMLM"):
        build_config({"module": "LSTMLM", "width": 3}, 16, 2)


@pytest.mark.parametrize("name", ["gpt2", "lstm-large"])
def test_a_size_of_zero_is_not_the_default(name):
    with pytest.raises(BatchError, match="a sequence of 0 tokens has no next token to learn"):
        build(name, seq=0)
    with pytest.raises(BatchError, match="a global batch of 0 is empty"):
        build(name, global_batch=0)


def test_unknown_name_gives_the_nearest():
    with pytest.raises(ModelError) as caught:
        find("llama-70b")
    assert "llama3-70b" in caught.value.hint


def test_too_long_a_sequence_for_learned_positions():
    with pytest.raises(BatchError, match="1024 learned positions"):
        build("gpt2", seq=2048)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 8}, "no model_type"),
        ({"model_type": "no-such-model"}, "cannot read the configuration"),
        (
            {"model_type": "llama", "architectures": ["LlamaForTokenClassification"]},
            "for which autopar cannot make a batch",
        ),
        (TINY["causal"] | {"num_attention_heads": 3}, "hidden size|hidden_size|multiple"),
    ],
)
def test_bad_configurations_are_the_users_errors(config, words):
    with pytest.raises(ModelError, match=words):
        build_config(config, 8, 2)
