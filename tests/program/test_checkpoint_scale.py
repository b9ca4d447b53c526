"""What a checkpoint of 16,384 ranks takes, from layouts alone; and which rank writes what."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoint_scale import DATA, LAYERS, TENSOR, layouts, measure_plans, own_boxes
from workers import WorkerPool

from autopar.program import box_files, boxes, state
from autopar.program.box_exchange import GroupTensors, rounds
from autopar.program.box_files import BoxTable, Entry, Region
from autopar.program.boxes import Box
from autopar.program.checkpoint_files import CheckpointError
from autopar.program.checkpoint_metadata import metadata_of

SAVE = "0" * 32


def test_the_plans_of_16384_ranks_are_small() -> None:
    """Four of 405B's 126 layers: what is linear in layers is below a 500th of what ranks sent before, and no tensor lacks a part."""
    found = measure_plans(layers=4, sample=8)
    before, after = found["before"], found["after"]
    assert found["ranks"] == 16_384
    assert after["boxes"] < before["boxes"] / 150
    assert after["bytes_on_rank_0"] * LAYERS / 4 < 10**9 > after["metadata_bytes"] * LAYERS / 4
    assert after["seconds_of_rank_0"] < before["seconds_of_rank_0"] / 10


def _tensors(rows: int, width: int, members: int, copies: tuple[int, int] = (0, 1)) -> GroupTensors:
    share = -(-rows // members)
    ranges = {
        i: (i * share * width, (min((i + 1) * share, rows) - i * share) * width) for i in range(-(-rows // share))
    }
    paths = tuple((("model", "w", key), torch.float32) for key in ("", "exp_avg"))
    return GroupTensors(0, paths, rows * width, width, ranges, *copies)


@pytest.mark.parametrize("members", [2, 3, 5])
@pytest.mark.parametrize("copies", [1, 2])
def test_every_element_is_written_once_and_a_round_is_bounded(
    members: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boxes, "LARGEST", 4000)
    written: dict[tuple[str, ...], list[int]] = {}
    loads = []
    for copy in range(copies):
        every = [_tensors(rows, 10, members, (copy, copies)) for rows in (101, 7, 250, 1)]
        load = [0] * members
        for chunks in rounds(every, members):
            received = [0] * members
            for chunk in chunks:
                received[chunk.member] += (chunk.high - chunk.low) * 4
                assert chunk.low % 10 == 0  # whole rows
                parts = [chunk.overlap(rank) for rank in range(members)]
                assert sum(high - low for low, high in parts) == chunk.high - chunk.low
                key = (str(every.index(chunk.tensors)), *chunk.path)
                written.setdefault(key, []).extend(range(chunk.low, chunk.high))
            assert max(received) <= 4000
            load = [a + b for a, b in zip(load, received, strict=True)]
        loads += load
    assert {len(elements) for elements in written.values()} == {1010, 70, 2500, 10}
    assert all(sorted(elements) == list(range(len(elements))) for elements in written.values())
    assert max(loads) - min(loads) <= 8000


def test_the_ranks_of_a_zero_group_have_all_rows() -> None:
    for layout in layouts(0, layers=2):
        for tensor in (0, TENSOR - 1):
            elements = sum(math.prod(own_boxes(layout, member, tensor).sizes) for member in range(DATA))
            assert elements == math.prod(extent for _, extent in layout.window({"tensor": (tensor, TENSOR)}))


def _table(rank: int, *parts: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...] = (4, 6)) -> BoxTable:
    entries = [
        Entry(("model", "w"), torch.float32, shape, Box(*part), Region(100 * i, 100, 64, (1,)))
        for i, part in enumerate(parts)
    ]
    return BoxTable(SAVE, f"__{rank}_0.distcp", {}, tuple(entries))


def test_boxes_that_do_not_fill_a_tensor_are_refused() -> None:
    left, right = ((0, 0), (4, 3)), ((0, 3), (4, 3))
    assert len(metadata_of([_table(0, left), _table(1, right)]).storage_data) == 2
    assert len(metadata_of([_table(0, left, right), _table(1, right)]).storage_data) == 2  # two ranks wrote the same
    for tables, why in (
        ([_table(0, left)], "have 12 elements of 24"),
        ([_table(0, left), _table(1, ((0, 2), (4, 3)))], "two boxes have the element"),
        ([_table(0, left), _table(1, ((1, 3), (4, 3)))], "a box ends at"),
        ([_table(0, left), _table(1, right, shape=(4, 7))], "different dtypes or shapes"),
    ):
        with pytest.raises(CheckpointError, match=why):
            metadata_of(tables)


def test_a_thread_that_saves_connects_to_few_ranks_and_waits_as_long_as_was_asked(workers4: WorkerPool) -> None:
    """A group that connects every pair of ranks has opened a descriptor for each other rank when it is made."""
    for (made, used, waits), (pairs, _, _) in zip(
        workers4.run("checkpoint_scale:descriptors", True),
        workers4.run("checkpoint_scale:descriptors", False),
        strict=True,
    ):
        assert made == pairs - 3 and used <= 7 and waits == 77


def test_pieces_are_consumed_where_the_file_cannot_be_opened(tmp_path: Path) -> None:
    """Other ranks take part in producing them: they would wait."""
    left = iter([1, 2, 3])
    with pytest.raises(OSError, match="No such file"):
        box_files.write(left, tmp_path / "nowhere", 0, "save", {})  # type: ignore[arg-type]
    assert list(left) == []


def test_a_buffer_with_two_names_is_in_a_state_dict_under_both() -> None:
    entries = [("norm.mean", None), ("net.1.mean", "norm.mean"), ("frozen", None)]
    buffer = {"original": "norm.mean", "persistent": True, "written": True}
    records = {"parameters": [], "buffers": [buffer], "model": [{"name": n, "alias": a} for n, a in entries]}
    assert state.other_names(records, ["norm.mean"]) == {"net.1.mean": "norm.mean"}
    assert state.other_names(records, ["net.1.mean"]) == {"norm.mean": "net.1.mean"}
    assert state.names_outside_program(records) == {"frozen"}
