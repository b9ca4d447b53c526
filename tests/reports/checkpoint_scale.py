"""Checkpoints at scale, and damaged ones: ``make report NAME=checkpoint-scale``.

*Plans.* Llama-3-405B on 16,384 ranks (pipeline 2 x tensor 16 x data 512 under ZeRO 3), from its layouts alone: what ranks send rank 0, what
rank 0 has to do with it, and what a reader finds, by torch's planner as programs used it before, and by tables at the ends of files.
*Files.* The descriptors that the process group of a thread that saves opens, on 4, 8 and 16 processes.
*Time.* Writing boxes with and without checksums, and by torch's writer.
*Damage.* A hundred damaged checkpoints, each loaded under the plan that saved it and under another one.

One JSON line per measurement; the page is made of them. Ends with status 1 if a damaged checkpoint is read.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from damage import KINDS as DAMAGE
from damage import damaged
from exactness import subject
from places import EVIDENCE
from results import quiet
from resumed import KIND, batch_of, emitted
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from workers import WorkerPool

from autopar.program import box_files
from autopar.program.box_exchange import GroupTensors, rounds
from autopar.program.box_files import BoxTable, Entry, Region
from autopar.program.boxes import Box, Piece, divided, full_piece, pieces
from autopar.program.checkpoint import Background
from autopar.program.checkpoint_metadata import metadata_of
from autopar.program.world import Layout

RESULTS = EVIDENCE / "checkpoint-scale.jsonl"
STAGES, TENSOR, DATA, LAYERS = 2, 16, 512, 126
_KEYS = ("exp_avg", "exp_avg_sq")
_SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {  # and the dim that tensor parallelism shards
    "self_attn.q_proj.weight": ((16384, 16384), 0),
    "self_attn.k_proj.weight": ((1024, 16384), 0),
    "self_attn.v_proj.weight": ((1024, 16384), 0),
    "self_attn.o_proj.weight": ((16384, 16384), 1),
    "mlp.gate_proj.weight": ((53248, 16384), 0),
    "mlp.up_proj.weight": ((53248, 16384), 0),
    "mlp.down_proj.weight": ((16384, 53248), 1),
    "input_layernorm.weight": ((16384,), None),
    "post_attention_layernorm.weight": ((16384,), None),
}


# -- plans ------------------------------------------------------------------------------------------------------------


def layouts(stage: int, layers: int = LAYERS) -> list[Layout]:
    """The parameters of a stage."""
    half = layers // STAGES
    shapes = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(stage * half, (stage + 1) * half)
        for name, shape in _SHAPES.items()
    }
    if stage == 0:
        shapes["model.embed_tokens.weight"] = (128256, 16384), 0
    else:
        shapes |= {"model.norm.weight": ((16384,), None), "lm_head.weight": ((128256, 16384), 0)}
    return [
        Layout(
            stage, name, name, shape, None, shape, shape, torch.float32, True, (),
            () if dim is None else (("tensor", dim),), ("data",) if dim is not None else ("data", "tensor"), None,
        )
        for name, (shape, dim) in shapes.items()
    ]  # fmt: skip


def own_boxes(layout: Layout, member: int, tensor: int, data: int = DATA, tensors: int = TENSOR) -> Box:
    """The rows of a rank's slice that FSDP2 gives a member of the ZeRO group."""
    window = layout.window({"tensor": (tensor, tensors)})
    share = -(-window[0][1] // data)
    low, high = min(member * share, window[0][1]), min((member + 1) * share, window[0][1])
    return Box(
        (window[0][0] + low, *(start for start, _ in window[1:])), (high - low, *(extent for _, extent in window[1:]))
    )


def plan_before(
    stage: int, member: int, tensor: int, data: int = DATA, tensors: int = TENSOR, layers: int = LAYERS
) -> SavePlan:
    """The plan of a rank that torch's planner gathers on rank 0: every box of the rank, and a number of steps for each parameter."""
    items, paths = [], {}
    for layout in layouts(stage, layers):
        box = own_boxes(layout, member, tensor, data, tensors)
        found = [(("model", layout.original), box, layout.original_shape)]
        found += [(("optimizer", layout.original, key), box, layout.original_shape) for key in _KEYS]
        found.append((("optimizer", layout.original, "step"), Box((), ()), ()))
        for path, each, shape in found:
            if 0 in each.sizes:
                continue
            name = ".".join(path)
            paths[name] = path
            chunk = ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
            described = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size(shape))
            items.append(WriteItem(MetadataIndex(name, each.offsets), WriteItemType.SHARD, tensor_data=described))
    return SavePlan(items, planner_data=paths)


def tables_after(data: int = DATA, tensors: int = TENSOR, layers: int = LAYERS) -> Iterator[BoxTable]:
    """The tables of all ranks' files, rank by rank."""
    rank = 0
    for stage in range(STAGES):
        own = layouts(stage, layers)
        by_tensor = [_boxes_of(own, tensor, data, tensors) for tensor in range(tensors)]
        for member in range(data):
            for tensor in range(tensors):
                yield _table(rank, by_tensor[tensor][member])
                rank += 1


def _boxes_of(own: list[Layout], tensor: int, data: int, tensors: int) -> list[list[Piece]]:
    """What each member of a ZeRO group writes, from the layouts: the chunks of the rounds of the exchange, cut into boxes."""
    coordinates = {"tensor": (tensor, tensors)}
    every = []
    for number, layout in enumerate(own):
        window = layout.window(coordinates)
        row = torch.Size([extent for _, extent in window[1:]]).numel()
        boxes = [own_boxes(layout, member, tensor, data, tensors) for member in range(data)]
        ranges = {
            member: ((box.offsets[0] - window[0][0]) * row, box.sizes[0] * row)
            for member, box in enumerate(boxes)
            if box.sizes[0]
        }
        paths = tuple(
            (path, torch.float32)
            for path in (("model", layout.original), *(("optimizer", layout.original, k) for k in _KEYS))
        )
        copy, copies = (tensor, tensors) if not layout.sharded else (0, 1)
        every.append(GroupTensors(number, paths, window[0][1] * row, row, ranges, copy, copies))
    found: list[list[Piece]] = [[] for _ in range(data)]
    for chunks in rounds(every, data):
        for chunk in chunks:
            layout, values = own[chunk.tensors.layout], torch.empty(chunk.high - chunk.low, device="meta")
            for piece in pieces(chunk.path, layout, layout.window(coordinates), values, chunk.low):
                found[chunk.member] += divided(piece)
    for layout in own:  # the rank with the first element has the number of steps
        if not any(start for start, _ in layout.window(coordinates)) and (layout.sharded or tensor == 0):
            found[0].append(full_piece(("optimizer", layout.original, "step"), torch.zeros(())))
    return found


def _table(rank: int, found: list[Piece]) -> BoxTable:
    entries, begin = [], 0
    for piece in found:
        length = piece.values.nbytes + 1200
        sums = (2**31,) * -(-length // box_files.BLOCK)
        entries.append(Entry(piece.path, piece.values.dtype, piece.shape, piece.box, Region(begin, length, 640, sums)))
        begin += length
    return BoxTable(
        "0" * 32, box_files.file_name(rank), {"keys": dict.fromkeys((*_KEYS, "step"), "tensor")}, tuple(entries)
    )


def measure_plans(data: int = DATA, tensors: int = TENSOR, layers: int = LAYERS, sample: int = 64) -> dict[str, Any]:
    """Bytes, boxes and this machine's seconds, before and after; those before are measured on ``sample`` ranks, and there are more."""
    ranks = STAGES * data * tensors
    plans = [plan_before(0, member, 0, sample, 1, layers) for member in range(sample)]
    one = pickle.dumps(plan_before(0, 7 % data, 0, data, tensors, layers))
    texts = [pickle.dumps(plan) for plan in plans]
    began = time.process_time()
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    _, metadata = planner.create_global_plan([pickle.loads(text) for text in texts])  # noqa: S301  our own
    pickle.dumps(metadata)
    per_item = (time.process_time() - began) / sum(len(plan.items) for plan in plans)
    items = len(plan_before(0, 7 % data, 0, data, tensors, layers).items)
    before = {
        "bytes_of_a_rank": len(one),
        "bytes_on_rank_0": len(one) * ranks,
        "boxes": items * ranks,
        "seconds_of_rank_0": round(per_item * items * ranks, 2),
    }
    began = time.process_time()
    encoded = [table.encoded() for table in tables_after(data, tensors, layers)]
    planning_s = time.process_time() - began
    began = time.process_time()
    metadata = metadata_of([BoxTable.decoded(text) for text in encoded])
    content = pickle.dumps(metadata)
    seconds = time.process_time() - began
    began = time.process_time()
    pickle.loads(content)  # noqa: S301  our own
    after = {
        "bytes_of_a_rank": max(map(len, encoded)),
        "bytes_on_rank_0": sum(map(len, encoded)),
        "boxes": len(metadata.storage_data),
        "seconds_of_rank_0": round(seconds, 2),
        "seconds_of_a_rank": round(planning_s / (STAGES * tensors), 2),
        "metadata_bytes": len(content),
        "seconds_to_open": round(time.process_time() - began, 2),
    }
    return {"what": "plans", "ranks": ranks, "layers": layers, "before": before, "after": after}


# -- files, time ------------------------------------------------------------------------------------------------------


def descriptors(lazy: bool) -> tuple[int, int, float]:
    """In a worker: how many descriptors the group of a thread that saves opens when it is made, and when it has done what a save does; and
    the seconds that it waits."""
    count = len(os.listdir("/proc/self/fd"))
    group: Any = Background(77.0)._group if lazy else dist.new_group(backend="gloo")
    made = len(os.listdir("/proc/self/fd")) - count
    dist.barrier()  # a rank that goes on connects to others
    for source in (0, dist.get_world_size() - 1):
        dist.all_reduce(torch.tensor(1), dist.ReduceOp.MIN, group=group)
        dist.broadcast_object_list(["x" * 1000], source, group=group)
    waits = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return made, len(os.listdir("/proc/self/fd")) - count, waits


def measure_files(processes: int) -> dict[str, Any]:
    pool = WorkerPool(processes)
    try:
        counts = [max(used for _, used, _ in pool.run("checkpoint_scale:descriptors", lazy)) for lazy in (False, True)]
    finally:
        pool.close()
    return {"what": "files", "processes": processes, "before": counts[0], "after": counts[1]}


def measure_time(mebibytes: int = 512, tries: int = 5) -> dict[str, Any]:
    """Writing boxes of 64 MiB onto this machine's disk, in turn with and without checksums, and by torch's writer."""
    values = torch.randn(mebibytes * 2**18 // 1024, 1024)
    own = list(divided(Piece(("model", "weight"), tuple(values.shape), Box((0, 0), tuple(values.shape)), values)))

    def with_sums(folder: Path) -> None:
        box_files.write(own, folder, 0, "save", {})

    def without(folder: Path) -> None:
        kept, zlib.crc32 = zlib.crc32, lambda *_: 0  # type: ignore[assignment]
        try:
            box_files.write(own, folder, 0, "save", {})
        finally:
            zlib.crc32 = kept  # type: ignore[assignment]

    def torchs(folder: Path) -> None:
        state = {str(i): piece.values.clone() for i, piece in enumerate(own)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)

    ways: dict[str, Callable[[Path], None]] = {"torch": torchs, "without": without, "with": with_sums}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(tries):
        for name, write in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                began, processor = time.perf_counter(), time.process_time()
                write(Path(folder))
                times[name].append((time.perf_counter() - began, time.process_time() - processor))
    medians = {
        name: [round(statistics.median(each[i] for each in found), 3) for i in range(2)]
        for name, found in times.items()
    }
    return {"what": "time", "mebibytes": mebibytes, "wall_and_processor_s": medians}


# -- damage -----------------------------------------------------------------------------------------------------------


def measure_damage(count: int, seed: int) -> list[dict[str, Any]]:
    lines = []
    pools = {ranks: WorkerPool(ranks) for ranks in (1, 2)}
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            plans = {2: "data 2, zero 1", 1: "one device"}
            graph = subject("mlp").graph
            programs = {
                ranks: emitted("mlp", KIND[kind].plan(graph), folder / str(ranks)) for ranks, kind in plans.items()
            }
            saved = str(folder / "saved")
            for step, start in ((1, {"state": f"{programs[2]}/initial.pt"}), (2, {"load": saved})):
                batches = [batch_of("mlp", step)]
                found = pools[2].run("resumed:trained", programs[2], batches, "adamw", save=saved, **start)
            for number in range(count):
                kind = list(DAMAGE)[number % len(DAMAGE)]
                step = Path(shutil.copytree(f"{saved}/step-2", folder / "damaged"))
                what = damaged(step, Path(saved) / "step-1", kind, seed * count + number)
                outcomes = [
                    pool.run("resumed:outcomes", programs[ranks], [str(step)], found[0]["state"])[0][0]
                    for ranks, pool in pools.items()
                ]
                shutil.rmtree(step)
                said = outcomes[0][1].replace(str(folder), "").split("; ")[0]
                lines.append(
                    {"what": "damage", "kind": kind, "done": what, "outcomes": [o for o, _ in outcomes], "said": said}
                )
                print(f"{number}: {kind}: {what}: {lines[-1]['outcomes']}", file=sys.stderr)
    finally:
        for pool in pools.values():
            pool.close()
    return lines


# -- the page ---------------------------------------------------------------------------------------------------------


def page(lines: list[dict[str, Any]]) -> str:
    (plans,) = (line for line in lines if line["what"] == "plans")
    (times,) = (line for line in lines if line["what"] == "time")
    files = [line for line in lines if line["what"] == "files"]
    hurt = [line for line in lines if line["what"] == "damage"]
    silent = sum("silent" in line["outcomes"] for line in hurt)
    refused = sum(set(line["outcomes"]) == {"refused"} for line in hurt)
    harmless = ", ".join(line["done"] for line in hurt if "read" in line["outcomes"])
    same = (
        f" Loaded with the right values, because the damage left the bytes unchanged: {harmless}." if harmless else ""
    )
    before, after = plans["before"], plans["after"]
    wall = times["wall_and_processor_s"]
    rows = "".join(
        f"| {title} | {_number(before.get(key))} | {_number(after[key])} |\n"
        for key, title in (
            ("bytes_of_a_rank", "bytes of one rank, at most (before: sent to rank 0; now: the table in its file)"),
            ("bytes_on_rank_0", "bytes that rank 0 reads from all ranks (before: into GPU memory)"),
            ("boxes", "boxes in the metadata"),
            ("seconds_of_rank_0", "processor seconds of rank 0"),
            ("seconds_of_a_rank", "processor seconds of each rank for its part of the save plan"),
            ("metadata_bytes", "bytes of the metadata"),
            ("seconds_to_open", "processor seconds to read the metadata"),
        )
    )
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in hurt:
        kinds.setdefault(line["kind"], []).append(line)
    damage = "".join(
        f"| {kind} | {len(found)} | {sum(set(f['outcomes']) == {'refused'} for f in found)} | {found[0]['done']} | {found[0]['said']} |\n"
        for kind, found in kinds.items()
    )
    groups = "".join(f"| {line['processes']} | {line['before']} | {line['after']} |\n" for line in files)
    return f"""# Checkpoints at scale, and damaged ones

## Plans

The save plans of Llama-3-405B with AdamW in float32 on {plans["ranks"]:,} ranks (pipeline 2 x tensor 16 x data 512, ZeRO 3), computed
from its layouts. *Before*: each rank sent its save plan to rank 0, which merged them (measured with 64 ranks and extrapolated). *Now*:
the ranks of a ZeRO group exchange their ranges first, each writes large boxes into a file that ends with a table of them, and rank 0
reads the tables.

| | before | now |
|---|---|---|
{rows}
## File descriptors of asynchronous saves

The number of file descriptors in each process that the process group of the saving thread opens. Before, every process was connected to
every other one. Now two processes connect when they exchange data, and reductions and broadcasts use rings and trees.

| processes | before | now |
|---|---|---|
{groups}
## Cost of checksums

Median seconds to write {times["mebibytes"]} MiB in boxes of 64 MiB:

| | elapsed | processor |
|---|---|---|
| with checksums | {wall["with"][0]} | {wall["with"][1]} |
| without | {wall["without"][0]} | {wall["without"][1]} |
| torch's writer | {wall["torch"][0]} | {wall["torch"][1]} |

## Damage

{len(hurt)} checkpoints were damaged, and each was loaded under the plan that saved it and on one device. {refused} are refused under both
plans, {silent} are loaded with wrong values.{same}

| damage | cases | refused | example | its error message |
|---|---|---|---|---|
{damage}
Made by `make report NAME=checkpoint-scale` with torch {torch.__version__}, from the lines of
[checkpoint-scale.jsonl](checkpoint-scale.jsonl). Do not edit.
"""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, metavar="N", help="how many damaged checkpoints")
    parser.add_argument("--seed", type=int, default=1, help="of the damage")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument(
        "--only", choices=("plans", "files", "time", "damage"), help="measure and print one part, and write no page"
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    quiet()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "plans": lambda: [measure_plans()],
        "files": lambda: [measure_files(processes) for processes in (4, 8, 16)],
        "time": lambda: [measure_time()],
        "damage": lambda: measure_damage(args.count, args.seed),
    }
    lines = [line for name, part in parts.items() if args.only in (None, name) for line in part()]
    for line in lines:
        print(json.dumps(line))
    if args.only is None:
        args.results.write_text("".join(json.dumps(line) + "\n" for line in lines))
        args.results.with_suffix(".md").write_text(page(lines))
    return 1 if any(line["what"] == "damage" and "silent" in line["outcomes"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
