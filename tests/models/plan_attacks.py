"""Random plan files that are no plans: names, types, ranges, nesting and sizes, drawn from a plan that fits the model of ``FACTORY``.

Texts that would run if they became code, or if a name in the file were imported, write the file that ``MARK`` names in the environment.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.plan_files import read_plan

MARK = "AUTOPAR_ATTACKED"
_RUN = f"__import__('pathlib').Path(__import__('os').environ['{MARK}']).touch()"

FACTORY = f'''
import os
import pathlib

import torch
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (torch.zeros(8, 8), torch.zeros(8, 8)), nn.functional.mse_loss


def attacked():
    pathlib.Path(os.environ["{MARK}"]).touch()
    return model()
'''
EVIL = f"import os, pathlib\npathlib.Path(os.environ['{MARK}']).touch()\n"
"""A module that marks its import; it lies beside the plan files as ``evil.py``."""

TEXTS = (
    f'data": {_RUN}, "x',
    f"data': {_RUN}, 'x",
    f'"""\n{_RUN}\n"""',
    f'\\"""\n{_RUN}\n\\"""',
    f"\n{_RUN}\n#",
    f"\r{_RUN}\r#",
    f"\x0c\x85\u2028{_RUN}",
    f"{{{_RUN}}}",
    f"%({_RUN})s",
    "evil.py:model",
    "evil:model",
    "./evil.py:attacked",
    "evil.py",
    "\x1b]0;title\x07",
    "\x00",
    "\u202edesrever",
    "\ud800",
    "\U0001f600",
    "<script>alert(1)</script>",
    "$(touch here)",
    "`touch here`",
    "../../../../etc/passwd",
    "/dev/zero",
    "a" * 200_000,
    "",
    " ",
    "class",
    "pipeline",
    "0",
    "data",
)
NUMBERS = (
    0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**9, 10**12, 10**18, 10**30, 10**400, -(10**400), 0.0, -0.0, 0.5, 1e308, 5e-324, -1e9,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"a": {}}, ["data"], {"name": "data"})

Draw = Callable[[random.Random, dict[str, Any]], str]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside of a JSON value."""
    if not isinstance(value, dict | list):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [*([path] if path else []), *(inner for key, item in items for inner in places(item, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    """Write ``new`` at a path."""
    *above, last = path
    for key in above:
        value = value[key]
    value[last] = new


def get(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _odd_value(rng: random.Random, old: Any) -> Any:
    """A value of the same type that is not as it should be, or of another type."""
    if rng.random() < 0.6 and isinstance(old, str):
        return rng.choice(TEXTS)
    if rng.random() < 0.6 and isinstance(old, int | float):
        return rng.choice(NUMBERS)
    return rng.choice((*TEXTS, *NUMBERS, *OTHERS))


def odd_values(rng: random.Random, plan: dict[str, Any]) -> str:
    """One to three fields with other values."""
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(places(plan))
        put(plan, path, _odd_value(rng, get(plan, path)))
    return json.dumps(plan)


def names(rng: random.Random, plan: dict[str, Any]) -> str:
    """A text in place of one that the emitter, a page or a terminal writes."""
    last = len(plan["layers"]) - 1
    fields: list[tuple[Any, ...]] = [
        ("model",), ("devices",), ("mesh", 0, "name"), ("solver",), ("notes", 0), ("imports", 0), ("nvme_path",), ("sync",),
        ("layers", rng.randint(0, last), "name"), ("layers", rng.randint(0, last), "class"), ("request", "model"),
        ("request", "devices"), ("request", "pins", 0), ("request", "precision"), ("precision",), ("schedule",),
    ]  # fmt: skip
    plan["notes"], plan["imports"], plan["request"]["pins"] = [""], [""], [""]
    for path in rng.sample(fields, rng.randint(1, 2)):
        put(plan, path, rng.choice(TEXTS))
    return json.dumps(plan)


def fields(rng: random.Random, plan: dict[str, Any]) -> str:
    """A field that is missing, that nobody knows, or that is there twice."""
    path = rng.choice([path for path in places(plan) if isinstance(path[-1], str)])
    kind = rng.choice(("missing", "unknown", "twice"))
    if kind == "missing":
        del get(plan, path[:-1])[path[-1]]
        return json.dumps(plan)
    if kind == "unknown":
        get(plan, path[:-1])[rng.choice(("init", "calibration", "output", "plan_file", "__class__", *TEXTS))] = 1
        return json.dumps(plan)
    text = json.dumps(plan)
    key = json.dumps(path[-1])
    return text.replace(f"{key}:", f"{key}: {rng.choice(('1', 'null', '[]'))}, {key}:", 1)


def totals(rng: random.Random, plan: dict[str, Any]) -> str:
    """Numbers that are possible alone and contradict the others."""
    stage, layer, axis = plan["stages"][0], rng.choice(plan["layers"]), plan["mesh"][0]
    plausible = rng.choice((1, 2, 3, 4, 8, 16, 64, 1024))
    where: tuple[Any, str] = rng.choice(
        (
            (stage["layers"], 0), (stage["layers"], 1), (stage["devices"], 0), (stage["devices"], 1), (stage, "memory_bytes"),
            (layer, "data"), (layer, "tensor"), (layer, "sequence"), (layer, "zero"), (layer, "replicate"), (axis, "size"),
            (axis, "stride"), (plan, "pipeline"), (plan, "chunks"), (plan, "microbatches"), (plan, "global_batch"), (plan, "prefetch"),
        )
    )  # fmt: skip
    where[0][where[1]] = plausible
    if rng.random() < 0.3:
        plan[rng.choice(("stages", "layers", "mesh"))] *= 2
    if rng.random() < 0.3:
        words = {
            "reduce": "step",
            "activations": rng.choice(("int8", "full:3", "selective", "host", "full:0", "keep:2")),
            "overlap": "halves",
            "states": "nvme",
            "logits": "sliced",
            "compile": "layers",
        }
        layer |= dict(rng.sample(sorted(words.items()), 2))
        if rng.random() < 0.5:  # a file of before
            del layer["activations"]
            kind = rng.choice(("none", "selective", "full"))
            layer |= {
                "recomputation": {"kind": kind, "layers": plausible},
                "offload": rng.choice(("none", "activations")),
            }
        layer["roles"] = [rng.choice(("data", "tensor", "ring", "ulysses", "expert", "idle", "tensor+rows"))]
    if rng.random() < 0.2:
        plan |= {
            "schedule": rng.choice(("none", "1f1b", "gpipe", "zbv", "chimera", "interleaved-1f1b")),
            "sync": "local-steps:3",
        }
    return json.dumps(plan)


def sizes(rng: random.Random, plan: dict[str, Any]) -> str:
    """Far too many of something."""
    kind = rng.randrange(6)
    if kind == 0:
        plan["mesh"] = [{"name": f"a{i}", "size": rng.choice((1, 2)), "stride": 1} for i in range(2000)]
    elif kind == 1:
        layer = json.dumps(plan["layers"][0])
        return json.dumps(plan | {"layers": []}).replace(
            '"layers": []', f'"layers": [{", ".join([layer] * 50_000)}]', 1
        )
    elif kind == 2:
        plan["layers"] = [{}] * 1_000_000
    elif kind == 3:
        plan |= {"prefetch": 10**9, "microbatches": 10**9, "global_batch": 10**9}
    elif kind == 4:
        plan["notes"] = ["a" * 10_000] * 2000
    else:
        plan["stages"] = plan["stages"] * 5000
    return json.dumps(plan)


def nesting(rng: random.Random, plan: dict[str, Any]) -> str:
    """Lists or objects inside of each other."""
    depth = rng.choice((50, 101, 900, 5000, 200_000))
    opened, closed = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"a":[', "]}]")))
    inner = opened * depth + ("1" if "a" in opened else "") + closed * (depth if rng.random() < 0.8 else 0)
    if rng.random() < 0.2:
        return inner
    path = rng.choice(places(plan))
    put(plan, path, "HERE")
    return json.dumps(plan).replace('"HERE"', inner, 1)


def damage(rng: random.Random, plan: dict[str, Any]) -> str:
    """Text that is cut off or changed."""
    text = json.dumps(plan, indent=1)
    at = rng.randrange(len(text))
    how = rng.randrange(4)
    if how == 0:
        return text[:at]
    if how == 1:
        return text[:at] + rng.choice('{}[]",:\x00\\0-eé') + text[at + 1 :]
    if how == 2:
        return text[:at] + "9" * 5000 + text[at:]
    return text.replace(rng.choice(("0", "1", "2")), rng.choice(("1e999", "-1", "NaN", "9" * 6000, "0x1", "1e-999")), 1)


KINDS: dict[str, Draw] = {
    "values": odd_values,
    "names": names,
    "fields": fields,
    "totals": totals,
    "sizes": sizes,
    "nesting": nesting,
    "damage": damage,
}


def draw(seed: int, plan: dict[str, Any]) -> tuple[str, str]:
    """The kind and the text of the plan file of a seed."""
    rng = random.Random(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    return kind, KINDS[kind](rng, copy.deepcopy(plan))


def read_attacks(base: Path, count: int) -> dict[str, int]:
    """How many of the first ``count`` attacks on the plan in a file are refused and read, beside the file. Raises ``RuntimeError`` for
    anything but a sentence with a hint, and for what takes longer than two processor seconds."""
    plan, file = json.loads(base.read_text()), base.with_name("attack.json")
    found = {"refused": 0, "read": 0}
    for seed in range(count):
        file.write_text(draw(seed, plan)[1], "utf-8", errors="surrogatepass")
        started = time.process_time()
        try:
            read_plan(file)
            found["read"] += 1
        except UsageError as error:
            error.message.encode("utf-8")
            if not (error.hint and len(error.message) < 2000 and error.message.isprintable()):
                raise RuntimeError(f"{seed}: {error.message}") from error
            found["refused"] += 1
        if time.process_time() - started > 2:
            raise RuntimeError(f"{seed} takes {time.process_time() - started:.1f} s")
    return found
