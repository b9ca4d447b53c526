"""Worker processes: results by rank, causes by name, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exactness import KINDS, run_case
from programs import Shape, write_mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from workers import WorkerPool

from autopar.errors import HANG, OUT_OF_MEMORY, LaunchError
from autopar.run.folder import import_runtime, program_modules
from autopar.run.processes import Processes


def add_ranks(x: torch.Tensor, scale: float = 1.0) -> dict[str, object]:
    print("this goes to the log")
    x = x * scale * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return {"sum": x, "rank": dist.get_rank(), "pid": os.getpid()}


def run_out_on(rank: int) -> None:
    if dist.get_rank() == rank:
        try:
            raise MemoryError
        except MemoryError as error:
            raise RuntimeError("a stage failed") from error
    dist.all_reduce(torch.ones(1))


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the batch is empty")
    dist.all_reduce(torch.ones(1))


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_results_come_by_rank_from_warm_processes(workers2: WorkerPool) -> None:
    first = workers2.run("test_run_processes:add_ranks", torch.ones(3), scale=2.0)
    second = workers2.run("test_run_processes:add_ranks", torch.ones(3))
    assert [r["rank"] for r in first] == [0, 1]
    assert all(torch.equal(r["sum"], torch.full((3,), 6.0)) for r in first)
    assert all(torch.equal(r["sum"], torch.full((3,), 3.0)) for r in second)
    assert [r["pid"] for r in first] == [r["pid"] for r in second]


def check_failure(target: str, cause: str, kind: str, **options: float) -> None:
    pool = WorkerPool(2)
    pids = [r["pid"] for r in pool.run("test_run_processes:add_ranks", torch.ones(1))]
    start = time.monotonic()
    with pytest.raises(LaunchError) as error:
        pool.run(f"test_run_processes:{target}", 1, **options)
    assert error.value.message.startswith(cause) and error.value.cause == kind
    assert time.monotonic() - start < 5
    assert all(_gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("target", "cause", "kind", "options"),
    [
        ("raise_on", "rank 1: ValueError: the batch is empty", "", {}),
        ("run_out_on", "rank 1: RuntimeError: a stage failed", OUT_OF_MEMORY, {}),
        ("die_on", "rank 1: was killed by signal 9", OUT_OF_MEMORY, {}),
        ("hang_on", "no answer from rank 1 ", HANG, {"timeout_s": 0.5}),
    ],
)
def test_a_failing_rank_is_the_cause_and_ends_all(
    target: str, cause: str, kind: str, options: dict[str, float]
) -> None:
    check_failure(target, cause, kind, **options)


def test_after_a_failure_there_are_new_processes() -> None:
    with WorkerPool(2) as pool:
        pids = [r["pid"] for r in pool.run("test_run_processes:add_ranks", torch.ones(1))]
        with pytest.raises(LaunchError):
            pool.run("test_run_processes:raise_on", 0)
        found = pool.run("test_run_processes:add_ranks", torch.ones(1))
        assert [r["rank"] for r in found] == [0, 1] and not set(pids) & {r["pid"] for r in found}


def test_after_an_interrupted_call_the_next_one_has_its_own_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(2) as pool:
        before = pool.run("test_run_processes:add_ranks", torch.ones(1))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("selectors.DefaultSelector.select", interrupt)
            pool.run("test_run_processes:add_ranks", torch.ones(1), scale=2.0)
        found = pool.run("test_run_processes:add_ranks", torch.ones(1), scale=3.0)
        assert [r["sum"].item() for r in found] == [9.0, 9.0]
        assert [r["pid"] for r in found] == [r["pid"] for r in before]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_call_that_only_some_ranks_have_got_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(2) as pool:
        pids = [r["pid"] for r in pool.run("test_run_processes:add_ranks", torch.ones(1))]
        assert (processes := pool._processes) is not None
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(processes._workers[1].stdin, "flush", interrupt)
            processes.call("autopar.run.pool:ready")
        assert all(_gone(pid) for pid in pids)
        with pytest.raises(LaunchError, match="the worker processes were ended"):
            processes.call("autopar.run.pool:ready")


def test_processes_of_their_own_start_answer_and_end(processes_of_their_own: None) -> None:
    """As in use; the other tests' workers are forks of one process (``forked``)."""
    check_failure("die_on", "rank 1: was killed by signal 9", OUT_OF_MEMORY)


def hashed() -> int:
    return hash("a name")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each rank has a Python, and a seed, of its own")
def test_strings_hash_differently_in_even_and_odd_ranks(workers2: WorkerPool) -> None:
    """What depends on the order of a set shows between ranks."""
    assert len(set(workers2.run("test_run_processes:hashed"))) == 2


def runtime_modules(folder: str, other: str, changed: str) -> list[bool]:
    """In a worker: whether two programs' modules are the same, have their own places and nothing that was left there; and those of a third
    program, which has another file."""
    with program_modules(folder):
        import_runtime(folder)
        first = sys.modules["runtime.mesh_axes"]
        trainer = sys.modules["runtime.trainer"].Trainer
        before = trainer.step
        first.left, trainer.left, trainer.step = True, True, None
        first._meshes.append("left")
    with program_modules(other):
        import_runtime(other)
        second = sys.modules["runtime.mesh_axes"]
        found = [second is first, str(second.__file__).startswith(other), trainer.step is before]
        found += [not hasattr(second, "left"), not hasattr(trainer, "left"), second._meshes == []]
    with program_modules(changed):
        import_runtime(changed)
        return [*found, sys.modules["runtime.mesh_axes"] is not first]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each rank is a Python of its own")
def test_workers_import_equal_runtimes_once_and_take_back_what_was_left(workers1: WorkerPool, tmp_path: Path) -> None:
    for name in ("one", "other", "changed"):
        write_mlp(tmp_path / name, Shape())
    with (tmp_path / "changed" / "runtime" / "world.py").open("a") as file:
        file.write("# changed\n")
    folders = [str(tmp_path / name) for name in ("one", "other", "changed")]
    assert all(workers1.run("test_run_processes:runtime_modules", *folders)[0])


def test_a_taken_port_is_said_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LaunchError, match="already taken") as error:
            Processes(2, port=taken.getsockname()[1])
    assert error.value.hint


def listening() -> list[str]:
    """The addresses on which this process listens, as hexadecimal digits."""
    own = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path("/proc/self/net", table).read_text().splitlines()[1:]]
        found += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_local_processes_listen_on_this_machine_alone(workers2: WorkerPool) -> None:
    before = set(listening())
    processes = Processes(1)
    try:
        own = set(listening()) - before
        assert own == {f"0100007F:{processes.store.port:04X}"}  # 127.0.0.1
    finally:
        processes.close()
    for found in workers2.run("test_run_processes:listening"):
        assert found and all(address.startswith("0100007F:") for address in found)  # gloo's


def threads_after_a_group() -> int:
    """A module that refers to itself and to a mesh, as sharded modules do; the threads that there are before it is left."""
    module = nn.Linear(4, 4)
    module.itself = [module]
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    module(torch.ones(2, 4)).sum().backward()
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted where Linux lists them")
def test_a_call_leaves_no_threads_of_its_group(workers2):
    counts = [max(workers2.run("test_run_processes:threads_after_a_group")) for _ in range(6)]
    assert counts[-1] <= counts[1], counts


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted where Linux lists them")
def test_a_program_leaves_no_threads_of_its_groups(workers2):
    kind = next(kind for kind in KINDS if kind.name == "tensor 2")
    counts = []
    for _ in range(4):
        run_case("mlp", kind, workers2, typed=False)
        counts.append(max(workers2.run("test_run_processes:threads")))
    assert counts[-1] <= counts[1], counts


def fail_to_connect(path: str) -> int:
    """As gloo does where its sockets do not come up; the second time all is well."""
    if dist.get_rank() == 1 and not Path(path).exists():
        Path(path).touch()
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer")
    return dist.get_rank()


def test_a_group_that_does_not_connect_is_made_once_more(tmp_path):
    with WorkerPool(2) as pool:
        assert pool.run("test_run_processes:fail_to_connect", str(tmp_path / "failed")) == [0, 1]
