"""Parameters over one memory stay one parameter while a model of a configuration moves to meta; other shared memory is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import ModelError
from autopar.zoo import hf, modules
from autopar.zoo.hf import build_config

VOCABULARY, WIDTH = 31, 8
CONFIG = {"module": "Reader", "vocab_size": VOCABULARY}


class Reader(nn.Module):
    """An embedding, a layer and a head; ``share`` changes which memory they have."""

    def __init__(self, share: Callable[[Any], None], vocab_size: int) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(vocab_size, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.register_buffer("mask", torch.ones(WIDTH))
        share(self)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        hidden = hidden + self.inner(hidden).tanh() * self.mask.to(hidden.dtype)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def by_data(model: Any) -> None:
    model.head.weight.data = model.embed.weight.data


def by_tensor(model: Any) -> None:
    """Both are registered with memory that is made elsewhere: neither is on meta before."""
    drawn = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))
    model.embed.weight, model.head.weight = nn.Parameter(drawn), nn.Parameter(drawn)


def by_object(model: Any) -> None:
    model.head.weight = model.embed.weight


def turned(model: Any) -> None:
    drawn = torch.randn(VOCABULARY * WIDTH)
    model.embed.weight = nn.Parameter(drawn.view(VOCABULARY, WIDTH))
    model.head.weight = nn.Parameter(drawn.view(WIDTH, VOCABULARY).t())


def part(model: Any) -> None:
    model.inner.bias = nn.Parameter(model.head.weight.data[3])


def small_part(model: Any) -> None:
    """The large one is moved to meta as it is registered, and this one is not."""
    drawn = torch.randn(VOCABULARY, WIDTH)
    model.head.weight = nn.Parameter(drawn)
    model.inner.bias = nn.Parameter(drawn[3])


def buffer(model: Any) -> None:
    drawn = torch.randn(VOCABULARY, WIDTH)
    model.embed.weight = nn.Parameter(drawn)
    model.mask = drawn[0]


def built(
    share: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, precision: str, device: str
) -> tuple[nn.Module, dict[str, Tensor]]:
    entry = (lambda vocab_size: Reader(share, vocab_size)), modules._text_batch
    monkeypatch.setitem(modules.MODULES, "Reader", entry)
    monkeypatch.setattr(hf, "_LARGE", VOCABULARY * WIDTH)
    torch.manual_seed(0)
    return build_config(CONFIG, 4, 6, precision, device)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("share", [by_data, by_tensor, by_object])
def test_ties_are_kept_on_meta(share: Callable[[Any], None], precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = built(share, monkeypatch, precision, "meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    parameters = capture(model, batch).parameters
    assert parameters["embed.weight"].tied == ("head.weight",) and "head.weight" not in parameters


@pytest.mark.parametrize("share", [by_data, by_tensor])
def test_a_tied_model_with_values_trains_as_the_one_that_was_written(
    share: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD writes to the memory once for each of its two parameters there, and once with the whole gradient here."""
    model, batch = built(share, monkeypatch, "float64", "cpu")
    torch.manual_seed(0)
    written = Reader(share, VOCABULARY)
    written.double()  # each parameter gets memory of its own
    written.head.weight.data = written.embed.weight.data
    assert all(torch.equal(value, written.state_dict()[name]) for name, value in model.state_dict().items())
    for _ in range(2):
        for each in (model, written):
            each.zero_grad()
            each(**batch).backward()
            torch.optim.SGD(each.parameters(), lr=0.5).step()
    for name, value in dict(model.named_parameters()).items():
        assert torch.allclose(value, written.state_dict()[name], rtol=0, atol=1e-12), name
    assert torch.equal(model.embed.weight, model.head.weight)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("share", [turned, part, small_part, buffer])
def test_what_shares_memory_otherwise_is_refused_by_name(
    share: Callable[[Any], None], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        turned: "head.weight and embed.weight",
        part: "head.weight and inner.bias",
        buffer: "embed.weight and mask",
    }
    with pytest.raises(ModelError, match="overlap in memory but are not tied") as error:
        built(share, monkeypatch, "float32", device)
    assert set(names.get(share, names[part]).split(" and ")) == set(
        str(error.value.message).split(" of the")[0].split(" and ")
    )
    assert error.value.hint
