"""A rank's place in the world, and the layout that a number of processes fits."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from meshwright.comm import process_groups
from meshwright.rank import env
from meshwright.rank import process_group as process_group_module
from meshwright.rank.env import Worker, fit_layout, keep_compiled_code, resolve, worker
from meshwright.rank.process_group import process_group
from meshwright.spec import UserError, load
from meshwright.spec.load import from_tree


def test_no_torchrun_is_no_worker() -> None:
    assert worker({}) is None
    assert worker({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None  # the script of a batch job
    assert worker({"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert worker({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}) is None
    assert worker({"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}) is None


def test_compiled_code_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given: dict[str, str] = {}
    keep_compiled_code(given)
    assert given == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / ".cache/meshwright/compiled")}
    own = {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    keep_compiled_code(own)
    assert own == {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    monkeypatch.setenv("HOME", "/dev/null/no-folder")
    nowhere: dict[str, str] = {}
    keep_compiled_code(nowhere)
    assert not nowhere  # torch's own place


def test_torchruns_environment_is_read() -> None:
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert worker(given) == Worker(5, 8, 1, 4, launched=False)
    assert worker({**given, env.SUPERVISOR: "{}"}) == Worker(5, 8, 1, 4, launched=True)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "LOCAL_RANK"),
        ({"RANK": "0"}, "RANK: '0' is given without WORLD_SIZE; .* unset RANK to run as one process"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE: '2' is given without RANK"),
        ({"RANK": "1", "LOCAL_RANK": "1"}, "without WORLD_SIZE; .* unset RANK and LOCAL_RANK"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK: '1' is given without RANK and WORLD_SIZE"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "2 tasks of Slurm, whose other .* --ntasks-per-node 1"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "SLURM_PROCID: this is task 1 of Slurm, whose other"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "2 tasks of Open MPI, .* ppr:1:node"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, "this is task 3 of Open MPI, .* each would run alone"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK: this is task 1 of Open MPI"),
        ({"PMI_SIZE": "16", "PMI_RANK": "0"}, "PMI_SIZE: 16 tasks of MPI, .* -ppn 1"),
        ({"MPI_LOCALRANKID": "1"}, "MPI_LOCALRANKID: this is task 1 of MPI"),
        ({"MV2_COMM_WORLD_SIZE": "4"}, "MV2_COMM_WORLD_SIZE: 4 tasks of MVAPICH"),
        ({"FLUX_JOB_SIZE": "2"}, "2 tasks of Flux"),
    ],
)
def test_half_an_environment_is_a_sentence(given: dict[str, str], name: str) -> None:
    with pytest.raises(UserError, match=name):
        worker(given)


@pytest.mark.parametrize(
    ("given", "ranks", "threads"),
    [
        ({}, 1, 8),
        ({}, 3, 2),
        ({}, 16, 1),
        ({"OMP_NUM_THREADS": "1"}, 1, 1),  # a machine that others use
        ({"OMP_NUM_THREADS": "6"}, 4, 6),
        ({"OMP_NUM_THREADS": "3,2"}, 1, 3),
        ({"OMP_NUM_THREADS": "99999999"}, 1, env.MOST_THREADS),  # so many cannot be made
        ({"OMP_NUM_THREADS": ""}, 2, 4),
        ({"OMP_NUM_THREADS": "many"}, 2, 4),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 2, 4),  # torchrun's own
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}, 2, 2),
    ],
)
def test_a_users_limit_on_threads_holds(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], ranks: int, threads: int
) -> None:
    found: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", found.append)
    monkeypatch.setattr("meshwright.host.cores", lambda: 8)
    assert env.limit_threads(ranks, given) == threads
    assert found == [threads]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"MASTER_PORT": "29500"}, "MASTER_ADDR: it is not set"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT: '' is not a port; give a free one of 127.0.0.1"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"}, "MASTER_PORT: 'abc' is not a port"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}, "MASTER_PORT: '70000' is not a port"),
    ],
)
def test_an_address_that_cannot_be_is_a_sentence(
    given: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words), process_group(Worker(0, 2, 0, 2)):
        pass


def test_a_port_that_is_taken_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        words = "rank 0 of 2 could not meet the others at 127.0.0.1:.* and a free port there"
        with pytest.raises(UserError, match=words), process_group(Worker(0, 2, 0, 2)):
            pass


def test_a_rank_that_does_not_come_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(process_groups, "TIMEOUT", timedelta(seconds=1))
    words = "rank 0 of 2 could not meet the others at .* see that all ranks are started"
    with pytest.raises(UserError, match=words), process_group(Worker(0, 2, 0, 2)):
        pass


def test_a_number_of_processes_fills_an_unset_layout_only() -> None:
    assert fit_layout({}, [], 4) == [("layout.dp", "4")]
    assert fit_layout({"layout": {"zero": 3}}, [], 4) == [("layout.dp", "4")]
    for axis in env.AXES:
        assert fit_layout({"layout": {axis: 2}}, [], 4) == []
        assert fit_layout({}, [(f"layout.{axis}", "2")], 4) == [(f"layout.{axis}", "2")]


def test_resolve_without_a_number_takes_the_layout() -> None:
    assert resolve({"layout": {"dp": 4}}).layout.world_size == 4
    assert resolve({}).layout.world_size == 1


def test_resolve_with_a_number_fills_dp_or_must_match() -> None:
    assert resolve({"layout": {"zero": 2}}, nproc="4").layout.dp == 4
    assert resolve({"layout": {"dp": 2}}, nproc=2).layout.dp == 2
    tree = {"layout": {"dp": 3}, "train": {"batch_tokens": 7680}}
    words = r"dp=3 .* is 3 ranks, but 4 were asked for; try --nproc 3 or --layout.dp 5 with --nproc 5"
    with pytest.raises(UserError, match=words):  # 30 sequences are not shared among 4
        resolve(tree, nproc=4)
    with pytest.raises(UserError, match=r"batch_tokens"):
        resolve({}, nproc=3)


@pytest.mark.parametrize("nproc", ["0", "-1", "two", "1.5", ""])
def test_a_number_that_is_none_is_a_sentence(nproc: str) -> None:
    with pytest.raises(UserError, match="--nproc"):
        resolve({}, nproc=nproc)


@pytest.mark.parametrize(("devices", "expected"), [(1, 1), (2, 2), (3, 2), (7, 4), (9, 8), (64, 16)])
def test_auto_takes_the_most_devices_that_share_the_batch(
    devices: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "count_devices", lambda: devices)
    spec = resolve({}, nproc="auto")  # 16 sequences a step
    assert spec.layout.dp == expected
    assert spec.batch_sequences % spec.layout.dp == 0


def test_auto_leaves_a_set_layout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "count_devices", lambda: 8)
    assert resolve({"layout": {"dp": 2}}, nproc="auto").layout.dp == 2
    assert resolve({}, [("layout.micro_batch", "4")], nproc="auto").layout.dp == 4


def test_a_lone_process_is_a_world_of_one_on_loopback(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        pytest.skip("this process already is a rank")
    with process_group(None) as group:
        value = torch.tensor([3.0])
        dist.all_reduce(value, group=group)
        assert value.item() == 3.0
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_the_interface_of_a_world_is_left_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next world of a process may have other hosts, whose messages loopback does not carry."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with process_group(None):
        assert os.environ["GLOO_SOCKET_IFNAME"] == env.LOOPBACK
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", env.LOOPBACK)
    with process_group(None):
        pass
    assert os.environ["GLOO_SOCKET_IFNAME"] == env.LOOPBACK


def test_every_axis_that_counts_is_known() -> None:
    layout = from_tree({}).layout
    product = 1
    for axis in env.AXES:
        product *= getattr(layout, axis)
    assert product == layout.world_size


_FAULTS = """
import resource, sys, torch
from meshwright.rank.env import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24).add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(touched() for _ in range(8)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory as they like")
def test_freed_memory_is_used_again() -> None:
    """64 MiB have 16,384 pages: what is given back to the kernel faults on each when it is touched again."""

    def pages(how: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", _FAULTS, how], capture_output=True, text=True, check=True, timeout=120
        )
        return int(ran.stdout)

    assert pages("keep") < 200 < pages("leave")


_STEPS = """
import random, re, torch
from pathlib import Path
from meshwright.rank.env import keep_freed_memory
torch.set_num_threads(1)
keep_freed_memory()
draw, small, peaks = random.Random(0), [], []
for _ in range(30):
    kept, small = [], small[-96:]
    for size in (4, 4, 8, 2) * 12:
        kept.append(torch.zeros(size << 16))
        small.append(torch.empty(draw.randrange(8)))
        torch.zeros(size << 17)
    while kept:
        kept.pop()
        torch.zeros(3 << 17), torch.zeros(5 << 16), torch.empty(draw.randrange(8))
    # Linux hands ru_maxrss on from the process that started this one, but not VmHWM.
    peaks.append(int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]))
print(1024 * (peaks[-1] - peaks[0]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory as they like")
def test_steps_that_are_alike_take_the_memory_of_the_first() -> None:
    """Each holds 54 MiB in the buffers of a forward, which its backward frees, and leaves small tensors."""

    def growth(environment: dict[str, str]) -> int:
        command = [sys.executable, "-c", _STEPS]
        ran = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=120, env=environment
        )
        return int(ran.stdout)

    usual = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    assert growth(env.without_small_caches(usual)) < 16e6
    # Where the heap happens to lie decides too: 1 process of 120 kept to its first step's memory by chance.
    assert any(growth(usual) > 16e6 for _ in range(5))


def test_tunables_that_are_given_stay() -> None:
    name, off = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"
    assert env.without_small_caches({"A": "b"}) == {"A": "b", name: off}
    assert env.without_small_caches({name: "glibc.malloc.check=1"})[name] == f"glibc.malloc.check=1:{off}"
    given = {name: "glibc.malloc.tcache_count=7"}
    assert env.without_small_caches(given) == given


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ({"layout.dp": 2}, 1, "dp=1, zero=0"),
        ({"layout.dp": 2}, 4, "dp=4, zero=0"),
        ({"layout.dp": 2, "layout.tp": 2}, 8, "dp=4 x tp=2, zero=0"),
        ({"layout.dp": 2, "layout.tp": 2}, 3, None),
        ({"layout.dp": 2, "layout.replicate": 2, "layout.zero": 3}, 2, "dp=2, zero=3"),
        ({"layout.dp": 2, "layout.replicate": 2, "layout.zero": 3}, 8, "replicate=4 x dp=2, zero=3"),
        ({"layout.dp": 2, "layout.replicate": 2, "layout.zero": 3}, 1, "dp=1, zero=3"),
        ({"layout.dp": 2}, 3, None),  # 8 sequences
    ],
)
def test_a_layout_gets_data_axes_of_the_ranks_at_hand(
    given: dict[str, int], ranks: int, expected: str | None
) -> None:
    spec = load(None, [*((k, str(v)) for k, v in given.items()), ("train.batch_tokens", str(8 * 512))])
    found = env.resized(spec, ranks)
    assert (found and found.layout.describe()) == expected


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
    ],
)
def test_gpus_memory_grows_in_segments_unless_the_user_says_how(
    given: dict[str, str], wanted: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set before CUDA is asked for anything: here it has no device, which is what ends the start."""
    for name in process_group_module.ALLOCATOR:
        monkeypatch.setenv(name, "")  # so that it is as before when the test ends
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: list[dict[str, str]] = []

    def count() -> int:
        seen.append({name: os.environ[name] for name in process_group_module.ALLOCATOR if name in os.environ})
        return 0

    monkeypatch.setattr("torch.cuda.device_count", count)
    with pytest.raises(UserError, match="has no GPU"), process_group(None, "cuda"):
        pass
    assert seen == [wanted]


def test_a_folder_of_the_packages_name_is_not_run_in_its_place(tmp_path: Path) -> None:
    """Python looks in the working directory first for a module that it is to run."""
    (tmp_path / "here" / "meshwright").mkdir(parents=True)
    (tmp_path / "here" / "meshwright" / "__init__.py").write_text("raise SystemExit('another')")
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "added.py").write_text("")
    program = "import meshwright, added; print(meshwright.__file__)"
    environment = env.with_own_modules({**os.environ, "PYTHONPATH": str(tmp_path / "later")})
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
    )
    assert Path(found.stdout.strip()) == Path(env.__file__).parents[1] / "__init__.py", found.stderr
