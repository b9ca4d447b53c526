"""A model on meta that its own initialisers fill: as on one device, bit for bit, and never whole in one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peaks import grown_by
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from workers import WorkerPool

import autopar
from autopar.cli import main
from autopar.errors import CaptureError, ModelError, UsageError
from autopar.program.state import INITIAL, NO_VALUES
from autopar.program.weights import mapped
from autopar.run import initialise
from autopar.run.initialise import OWN, with_buffer_values, write_initial_values

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip


class Tied(nn.Module):
    """Two names for one parameter, a table that an initialiser makes, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(12, 8, padding_idx=2), nn.BatchNorm1d(8), nn.Linear(8, 12)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.empty(8), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(8, device=self.table.device) / 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)) * self.table)


class TiedByData(Tied):
    """Two parameters over one memory, of which the second is initialised last."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embed.weight.data)


class Turned(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.empty(8, 12).t())
        self.embed.weight.data = self.head.weight.data.as_strided((12, 8), (8, 1))


class TiedLater(Tied):
    """An initialiser ties what the model's constructor does not."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.empty(12, 8))

    def init_weights(self) -> None:
        resets(self)
        self.head.weight.data = self.embed.weight.data


class Scaled(nn.Module):
    """A parameter and a buffer that no initialiser writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(2, dtype=torch.bool))


class Drawn(nn.Module):
    """A table that is drawn, and one that has a parameter's value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.empty(4))

    def reset_parameters(self) -> None:
        self.table.normal_()


def drawn(module: nn.Module) -> None:
    """An initialiser in all the ways that these are written."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0, 0.3)
        module.weight.data = module.weight.data * 2
        with torch.no_grad():
            module.bias[:] = torch.rand(module.bias.shape, device=module.bias.device)
    elif isinstance(module, nn.Embedding):
        nn.init.orthogonal_(module.weight)


def resets(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def own(model: Any) -> None:
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)
    model.init_weights()


def kept_tied(model: nn.Module) -> nn.Module:
    """``to_empty`` makes two parameters of a tied one."""
    if isinstance(model, TiedByData):
        model.head.weight.data = model.embed.weight.data
    elif isinstance(model, Tied):
        model.head.weight = model.embed.weight
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[nn.Module], None]]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), OWN, own),
    "llama, tied": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)), OWN, own),
    "mixtral": (lambda: MixtralForCausalLM(MixtralConfig(**SIZES)), OWN, own),
    "gpt2": (lambda: GPT2LMHeadModel(gpt2_config()), OWN, own),
    "tied": (Tied, OWN, resets),
    "tied by data": (TiedByData, OWN, resets),
    "bfloat16": (lambda: nn.Sequential(nn.Linear(64, 64), nn.LSTM(8, 8), nn.Conv2d(3, 4, 3)).bfloat16(), OWN, resets),
    "function": (lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8)), drawn, lambda model: model.apply(drawn)),
}  # fmt: skip


def gpt2_config() -> GPT2Config:
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    return GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ends,
    )  # fmt: skip


def one_device(build: Callable[[], nn.Module], run: Callable[[nn.Module], object], seed: int) -> nn.Module:
    """What the docstring of ``autopar.run.initialise`` says."""
    with torch.device("meta"):
        model = build()
    model = kept_tied(model.to_empty(device="cpu"))
    torch.manual_seed(seed)
    run(model)
    return model


def stored(folder: Path) -> dict[str, Tensor]:
    return mapped(folder / INITIAL)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_one_device(case: str, tmp_path: Path) -> None:
    build, init, run = CASES[case]
    with torch.device("meta"):
        model = build()
    (tmp_path / "plan.json").write_text(json.dumps({"notes": [NO_VALUES]}))
    before, kept = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    planned = with_buffer_values(model, init)
    write_initial_values(planned, init, 7, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(value.is_meta for value in model.state_dict().values()) and set(kept) == set(model.state_dict())
    wanted = one_device(build, run, 7)
    same(stored(tmp_path), wanted.state_dict())
    tables = dict(planned.named_buffers())
    assert all(torch.equal(tables[name], value) for name, value in wanted.named_buffers())
    assert json.loads((tmp_path / "plan.json").read_text())["notes"] == []


def of_classes(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels)


def test_a_tie_by_data_on_meta_trains_as_one_parameter() -> None:
    """Values, gradients and updates: SGD writes to the memory once for each of the two parameters."""
    with torch.device("meta"):
        model = kept_tied(TiedByData().double())
    ids = torch.arange(8) % 12
    options = {"init": OWN, "seed": 5, "data": 1, "time_limit_s": 1, "optimizer": sgd, "type_check": False}
    wanted = one_device(lambda: TiedByData().double(), resets, 5)
    with autopar.compile(model, 1, (ids, ids + 1), of_classes, **options) as program:
        same(program.state_dict(), wanted.state_dict())
        loss, gradients = program.gradients((ids, ids + 1))
        expected = of_classes(wanted(ids), ids + 1)
        expected.backward()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
        summed = wanted.embed.weight.grad + wanted.head.weight.grad
        assert torch.allclose(gradients["embed.weight"], summed, rtol=1e-9, atol=1e-12)
        program.load_state_dict(one_device(lambda: TiedByData().double(), resets, 5).state_dict())
        program.step((ids, ids + 1))
        sgd(wanted.parameters()).step()
        found = program.state_dict()
    assert torch.equal(found["embed.weight"], found["head.weight"])
    for name, parameter in wanted.named_parameters():
        assert torch.allclose(found[name], parameter, rtol=1e-9, atol=1e-12), name


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def ties_by_object(module: nn.Module) -> None:
    if isinstance(module, TiedLater):
        module.head.weight = module.embed.weight


def test_ties_that_an_initialiser_makes_and_parts_of_parameters_are_refused() -> None:
    """One device would initialise two parameters and then tie them, and its model differs from the one that was planned."""
    for init in (OWN, ties_by_object):
        with pytest.raises(ModelError, match="an initialiser of the model ties head.weight to embed.weight") as error:
            with_buffer_values(model_on_meta(TiedLater), init)
        assert error.value.hint
    with pytest.raises(
        CaptureError, match=r"the parameter head.weight \[12, 8\] shares memory with the parameter embed.weight"
    ):
        with_buffer_values(model_on_meta(Turned), OWN)


def test_what_no_initialiser_writes_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    for kind, names in (
        (Scaled, "no initialiser of the model writes scale, steps, flags"),
        (Drawn, "random numbers or parameters decide the values of the buffers table"),
    ):
        with torch.device("meta"):
            model = kind()
        with pytest.raises(ModelError, match=names) as error:
            write_initial_values(with_buffer_values(model, OWN), OWN, 1, tmp_path)
        assert error.value.hint and [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(ModelError, match="no initialiser of the model writes scale, linear.bias"):
        write_initial_values(with_buffer_values(model_on_meta(Scaled), weights_alone), weights_alone, 0, tmp_path)
    with pytest.raises(ModelError, match="an initialiser of the model raised RuntimeError: no"):
        with_buffer_values(model_on_meta(Scaled), refuses)
    with pytest.raises(UsageError, match="this model has values already"):
        with_buffer_values(Scaled(), OWN)


def test_buffers_in_no_state_dict_have_values_without_an_initialiser() -> None:
    """Where values come from files, or the plan is all that is wanted; drawn ones, and those of state dicts, stay on meta."""
    for init in (None, Path("weights")):
        model = model_on_meta(lambda: LlamaForCausalLM(LlamaConfig(**SIZES)))
        planned = with_buffer_values(model, init)
        wanted = dict(LlamaForCausalLM(LlamaConfig(**SIZES)).named_buffers())
        same({name: buffer for name, buffer in planned.named_buffers() if not buffer.is_meta}, wanted)
        assert wanted and all(tensor.is_meta for tensor in (*planned.parameters(), *model.buffers()))
    drawn_table = model_on_meta(Drawn)
    drawn_table._non_persistent_buffers_set.add("table")
    assert "table" not in drawn_table.state_dict() and with_buffer_values(drawn_table, None).table.is_meta
    assert with_buffer_values(model_on_meta(Tied), None).norm.running_mean.is_meta
    plain = Scaled()
    assert with_buffer_values(plain, None) is plain


def model_on_meta(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def weights_alone(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)
    elif isinstance(module, Scaled):
        module.steps.zero_()
        module.flags.fill_(False)


def refuses(module: nn.Module) -> None:
    raise RuntimeError("no")


def peak_bytes(folder: str) -> int:
    """In a worker: by how much memory grows while 192 MiB are initialised, and while the file is checked."""
    model = model_on_meta(lambda: nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(24))))
    initialise._RESIDENT_BYTES = 2**24
    return grown_by(lambda: write_initial_values(with_buffer_values(model, OWN), OWN, 0, Path(folder)))


def test_the_process_has_a_few_tensors_at_a_time(workers1: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (grown,) = workers1.run("test_run_initialise:peak_bytes", str(tmp_path))
    assert (tmp_path / INITIAL).stat().st_size > 192 * 2**20
    assert grown < 64 * 2**20


def of_logits(output: Any, labels: Tensor) -> Tensor:
    """In float64: the model's own loss is one of float32."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def test_a_model_on_meta_trains_from_its_own_initialisers(tmp_path: Path) -> None:
    """With a table of rotary frequencies that has no values before; each of two processes reads its shards."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    ids = torch.arange(32).view(4, 8) * 7 % 64
    options = {"init": OWN, "seed": np.int64(5), "data": 2, "zero": 3, "time_limit_s": 5}
    with autopar.compile(model, 2, (ids, ids), of_logits, folder=tmp_path / "program", **options) as program:
        wanted = one_device(lambda: LlamaForCausalLM(LlamaConfig(**SIZES)).double(), own, 5)
        same(program.state_dict(), wanted.state_dict())
        assert program.step((ids, ids)) == pytest.approx(float(of_logits(wanted(ids), ids).detach()), rel=1e-9)
    assert NO_VALUES not in json.loads((tmp_path / "program" / "plan.json").read_text())["notes"]


def test_a_folder_that_transformers_saved_is_a_model_with_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    model = GPT2LMHeadModel(gpt2_config()).eval()
    folder = tmp_path / "saved"
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    common = ["--devices", "2", "--time-limit", "5", "--seq", "8", "--global-batch", "4"]
    losses = []
    for given in ([str(folder)], [str(folder), "--init", "own"]):
        with pytest.raises(SystemExit) as ended:
            main(["run", *given, *common, "--steps", "1", "--tensor", "2"])
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        losses.append(float(out.split()[-1]))
    from autopar.cli.load import SizeOptions, load_model

    batch = load_model(str(folder), SizeOptions(8, 4, "float32"), device="cpu").batch
    assert losses[0] == pytest.approx(float(model(**batch).loss.detach()), abs=2e-6) != losses[1]
    with pytest.raises(SystemExit) as ended:
        main(["emit", str(folder), *common, "-o", str(tmp_path / "program")])
    out, err = capsys.readouterr()
    assert ended.value.code == 0 and f"train.py --init {folder}" in err
    assert not (tmp_path / "program" / INITIAL).exists()
