"""Configurations that trainers' own repositories publish, priced and compared: ``make report NAME=configurations`` writes
``docs/evidence/configurations.{jsonl,md}``.

Each case is a file of a repository at a commit, read as ``autopar compare`` reads a user's file. ``--repositories DIR`` has the clones
(bare, or with a work tree), named ``owner+name``; the files themselves are not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from places import EVIDENCE, ROOT

RESULTS = EVIDENCE / "configurations.jsonl"
LIMIT_S = 300

MEGATRON, TITAN = "NVIDIA/Megatron-LM", "pytorch/torchtitan"
MIXTRAL = "tests/functional_tests/test_cases/mixtral"
MODELS = "torchtitan/models"
DEEPSPEED = "deepspeedai/DeepSpeedExamples", "training/autotuning/hf/dsconfigs"

CASES = (  # repository, file, function, model, devices
    (MEGATRON, "examples/llama/train_llama3_8b_h100_fp8.sh", "", "llama3-8b", "8xH100-80GB"),
    (MEGATRON, "examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh", "", "llama3-8b", "8xH100-80GB"),
    (MEGATRON, "examples/gpt3/train_gpt3_175b_distributed.sh", "", "gpt3-175b", "128x8xA100-80GB-SXM"),
    (MEGATRON, "examples/mixtral/train_mixtral_8x7b_distributed.sh", "", "mixtral-8x7b", "4x8xH100-80GB"),
    (
        MEGATRON,
        f"{MIXTRAL}/mixtral_8x7b_alltoall_tp2pp4ep4_release/model_config.yaml",
        "",
        "mixtral-8x7b",
        "8x8xH100-80GB",
    ),
    (MEGATRON, f"{MIXTRAL}/mixtral_8x7b_tp1pp4ep8vpp8_release/model_config.yaml", "", "mixtral-8x7b", "8x8xH100-80GB"),
    (TITAN, f"{MODELS}/llama3/config_registry.py", "llama3_8b", "llama3-8b", "8xH100-80GB"),
    (TITAN, f"{MODELS}/llama3/config_registry.py", "llama3_70b", "llama3-70b", "32x8xH100-80GB"),
    (TITAN, f"{MODELS}/llama3/config_registry.py", "llama3_405b", "llama3-405b", "64x8xH100-80GB"),
    (TITAN, f"{MODELS}/qwen3/config_registry.py", "qwen3_30b_a3b", "qwen3-30b-a3b", "4x8xH100-80GB"),
    (TITAN, f"{MODELS}/deepseek_v3/config_registry.py", "deepseek_v3_671b", "deepseek-v3", "128x8xH100-80GB"),
    (TITAN, f"{MODELS}/gpt_oss/config_registry.py", "gpt_oss_120b", "gpt-oss-120b", "8x8xH100-80GB"),
    (*DEEPSPEED, "ds_config_fp16_z1.json", "gpt2-xl", "8xA100-80GB-SXM"),
    (*DEEPSPEED, "ds_config_z3.json", "llama3-8b", "8xA100-80GB-SXM"),
    ("huggingface/accelerate", "examples/slurm/fsdp_config.yaml", "", "llama3-8b", "8xH100-80GB"),
    ("huggingface/accelerate", "examples/config_yaml_templates/fsdp.yaml", "", "llama3-8b", "8xH100-80GB"),
)


def work(repositories: Path, case: tuple[str, str, str, str, str]) -> dict[str, Any]:
    """Return the line of a case."""
    repository, path, rest, model, devices = case
    name = repository.replace("/", "+")
    folder = next(place for place in (repositories / name / "repo", repositories / name) if place.is_dir())
    function = "" if "." in rest else rest
    file = f"{path}/{rest}" if "." in rest else path
    git = ["git", "-C", str(folder)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    text = subprocess.run([*git, "show", f"HEAD:{file}"], capture_output=True, text=True, check=True).stdout
    line = {
        "repository": repository,
        "commit": commit,
        "file": file,
        "function": function,
        "model": model,
        "devices": devices,
    }
    with tempfile.TemporaryDirectory() as place:
        copied = Path(place, Path(file).name)
        copied.write_text(text)
        source = f"{copied}:{function}" if function else str(copied)
        command = [sys.executable, "-W", "ignore", "-m", "autopar"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        given = [*command, "compare", source, "--model", model, "--devices", devices, "--json"]
        done = subprocess.run(given, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    if done.returncode:
        words = [each for each in done.stderr.splitlines() if each.startswith(("error:", "hint:"))]
        return line | {"refused": " ".join(words).replace(str(copied), Path(file).name)}
    found = json.loads(done.stdout)
    return line | {
        "trainer": found["trainer"],
        "figures": {each["figure"]: {k: v for k, v in each.items() if k != "figure"} for each in found["figures"]},
        "changes": found.get("changes", [])[:1],
        "notes": found.get("notes", []),
    }


def page(lines: list[dict[str, Any]]) -> str:
    """Return the page of the lines."""
    read = [line for line in lines if "refused" not in line]
    parts = [
        "# Published configurations, priced and compared\n",
        f"{len(lines)} configurations from trainers' own repositories, read by `autopar compare FILE --model M --devices D`. "
        f"{len(read)} are priced, {len(lines) - len(read)} are refused, with the name of the unsupported option. Sizes that "
        "a file does not set",
        "are the trainer's defaults or those of the model. *Configuration* is the step time of the file's own setting, "
        "*best* that of the fastest",
        "setting of the same trainer in the same precision that fits in memory, and *autopar* that of the program that "
        "autopar would emit, in the",
        "model's 16-bit precision. All three are predictions; none was run.\n",
        "| file | model, devices | configuration | memory | best of the trainer | autopar | most useful single change |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        name = f"{line['repository']}: {Path(line['file']).parent.name}/{Path(line['file']).name}"
        name += f" `{line['function']}`" if line["function"] else ""
        start = f"| {name} | {line['model']}, {line['devices']} | "
        if "refused" in line:
            parts.append(f"{start}{line['refused']} | | | | |")
            continue
        step, memory = line["figures"]["step time"], line["figures"]["memory, total"]
        own, best, program = step.values()
        over = " (does not fit)" if any("does not fit" in note for note in line["notes"]) else ""
        change = line["changes"][0] if line["changes"] else None
        gain = f"{change['change']}: {change['step_time_s']:.4g} s" if change else "-"
        parts.append(
            f"{start}{own:.4g} s{over} | {next(iter(memory.values())) / 1e9:.1f} GB | {best:.4g} s | {program:.4g} s | {gain} |"
        )
    commits = dict.fromkeys((line["repository"], line["commit"]) for line in lines)
    parts += ["", "Repositories: " + ", ".join(f"{name} at `{commit[:12]}`" for name, commit in commits) + "."]
    return "\n".join([*parts, "", "Made by `make report NAME=configurations`. Do not edit."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repositories", type=Path, help="the folder of the clones")
    parser.add_argument("--page", action="store_true", help="make the page anew, price nothing")
    args = parser.parse_args()
    if not args.page:
        if args.repositories is None:
            parser.error("name the folder of the clones with --repositories")
        lines = []
        for case in CASES:
            lines.append(work(args.repositories, case))
            print(lines[-1]["file"], lines[-1].get("refused", ""), file=sys.stderr, flush=True)
            RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (EVIDENCE / "configurations.md").write_text(page([json.loads(line) for line in RESULTS.read_text().splitlines()]))


if __name__ == "__main__":
    main()
