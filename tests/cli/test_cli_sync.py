"""``autopar dev sync``: the table of synchronisations."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from autopar.cli.app import cli
from autopar.devices import parse
from autopar.errors import UsageError
from autopar.plan import Axis
from autopar.price.collectives import group, group_time_s
from autopar.types import Collective
from autopar.units import parse_count


def invoke(*arguments: str) -> str:
    return CliRunner().invoke(cli, ("dev", "sync", *arguments), catch_exceptions=False).stdout


def test_every_way_and_algorithm_has_a_row() -> None:
    found = json.loads(invoke("1B", "--devices", "2x8xH100-80GB", "--precision", "float32", "--json"))
    at = {(row["sync"], row["algorithm"]): row for row in found}
    assert len(at) == len(found)
    whole = 4e9
    ring, served = at["all-reduce", "ring"], at["parameter-server", "sequential"]
    assert ring["messages"] == 30 and ring["traffic_bytes"] == pytest.approx(2 * 15 * whole)
    assert ring["busiest_bytes"] == pytest.approx(4 * 15 / 16 * whole)
    assert served["messages"] == 30 and served["busiest_bytes"] == pytest.approx(2 * 15 * whole)
    assert served["seconds"] > 5 * ring["seconds"]
    apart = at["local-steps:8", "ring"]
    for figure in (
        "seconds",
        "messages",
        "traffic_bytes",
        "busiest_bytes",
    ):  # in float32 masters are as large as gradients
        assert apart[figure] == pytest.approx(ring[figure] / 8)
    other = json.loads(invoke("1B", "--devices", "2x8xH100-80GB", "--steps", "2", "--json"))
    assert {row["sync"] for row in other} == {"all-reduce", "parameter-server", "local-steps:2"}
    cluster = parse("2x8xH100-80GB")
    members = group((Axis("data", 16, 1),), cluster)
    priced = group_time_s(Collective.ALL_REDUCE, whole, members, cluster)
    assert at["all-reduce", "as priced"]["seconds"] == pytest.approx(priced)
    assert at["all-reduce", "as priced"]["traffic_bytes"] is None


def test_the_table_says_what_the_rows_say() -> None:
    printed = invoke("70B", "--devices", "8xH100-80GB")
    assert "halving-doubling" in printed and "parameter-server" in printed and "as priced" in printed
    assert "70B parameters in bfloat16" in printed


def test_numbers_of_parameters() -> None:
    assert [parse_count(text) for text in ("7B", "350M", "7e9", " 1.5b ", "12")] == [
        7_000_000_000, 350_000_000, 7_000_000_000, 1_500_000_000, 12,
    ]  # fmt: skip
    for text in ("", "0", "B", "seven", "1.2.3", "7GB", "-1"):
        with pytest.raises(UsageError, match="is not a number of parameters"):
            parse_count(text)
