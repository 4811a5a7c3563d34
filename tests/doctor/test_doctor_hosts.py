"""Faults of a host that `meshwright doctor` names, planted with real parts, and nothing on a clean host."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from examined import (
    LONGEST_S,
    SMALL,
    Host,
    examined,
    is_root,
    library,
    mounted,
    sentences,
    start,
    together,
)

as_root = pytest.mark.skipif(not is_root(), reason="file systems are mounted by root")
compiles = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler"
)

NO_LOCKS = "int flock(int descriptor, int operation) { return 0; }"
NO_SYNC = "#include <errno.h>\nint fsync(int descriptor) { errno = EIO; return -1; }"
NO_REPLACE = """
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
int rename(const char *from, const char *to) {
    if (access(to, F_OK) == 0) return unlink(from);  /* as a server that keeps the old file */
    return syscall(SYS_rename, from, to);
}
"""


def test_a_clean_host_has_no_findings_and_nothing_stays(tmp_path: Path) -> None:
    out = tmp_path / "run"
    found = examined(*SMALL, "--layout.dp", "2", "--out", str(out))
    assert found["healthy"] and not found["fails"] and found["code"] == 0 and sentences(found) == []
    assert found["ranks"] == 2 and found["hosts"] == 1 and found["seconds"] < 30
    (group,) = found["measured"]["groups"]
    assert group["slowest"] == [0, 1] and group["seconds"] > 0 and group["first_seconds"] > 0
    assert (
        found["measured"]["disk"]["bytes_per_second"] > 0
        and found["measured"]["disk"]["checkpoint_bytes"] > 0
    )
    assert list(tmp_path.iterdir()) == []


@as_root
def test_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-o", "size=1m") as disk:
        with (disk / "full").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        found = examined("--out", str(disk))
        assert found["code"] == 1 and sentences(found) == [
            f"folder [0]: no rank can write a file in {disk} (No space left on device)"
        ]
        assert found["findings"][0]["remedy"].startswith("free space there")
        assert [each.name for each in disk.iterdir()] == ["full"]


@as_root
def test_a_folder_that_can_only_be_read(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-o", "size=1m,ro") as disk:
        found = examined("--out", str(disk))
    assert found["code"] == 1 and sentences(found) == [
        f"folder [0]: no rank can make a folder in {disk} (Read-only file system)"
    ]
    assert found["findings"][0]["remedy"].startswith("mount it writable")


@pytest.mark.full  # `test_checkpoints_that_are_there_give_their_place_to_newer_ones` counts it
@as_root
def test_a_disk_without_room_for_the_checkpoints_that_are_kept(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-o", "size=2m") as disk:
        small = examined(*SMALL, "--checkpoint.keep", "3", "--out", str(disk))
        assert examined(*SMALL, "--checkpoint.every", "0", "--out", str(disk))["healthy"]
    assert small["code"] == 1 and sentences(small) == [
        f"space [0]: {disk} has 2.1 MB for checkpoints, and the run keeps 4 checkpoints of 758 KB at once"
    ]
    assert "checkpoint.keep (3)" in small["findings"][0]["remedy"]


def test_a_disk_that_is_slower_than_checkpoints_are_due(tmp_path: Path) -> None:
    large = ("--model.preset", "tiny", "--model.layers", "8", "--model.hidden", "1024", "--model.ffn", "4096")
    words = (*large, "--checkpoint.keep", "1", "--cluster", "h100", "--out", str(tmp_path))
    found = examined(*words, "--checkpoint.every", "1")
    (line,) = sentences(found)
    assert line.startswith("disk rate [0]: a checkpoint of ") and "one is due every 1 step, about" in line
    assert found["code"] == 0 and not found["healthy"]
    disk = found["measured"]["disk"]
    assert disk["save_seconds"] > disk["interval_seconds"] > 0
    assert disk["save_seconds"] == pytest.approx(disk["checkpoint_bytes"] / disk["bytes_per_second"])
    assert examined(*words, "--checkpoint.every", "100000")["healthy"]


@pytest.mark.full  # `test_ranks_of_large_worlds_need_more_open_files` has the limits
def test_few_open_files(tmp_path: Path) -> None:
    few = Host(enter=("sh", "-c", 'ulimit -n 64; exec "$@"', "sh"))
    found = examined(*SMALL, "--layout.dp", "2", "--out", str(tmp_path), host=few)
    (line,) = sentences(found)
    assert line.startswith(
        "limits [0, 1]: a process may have 64 files open, which is enough for 2 ranks, but"
    )
    assert found["code"] == 0 and "ulimit -n 65536" in found["findings"][0]["remedy"]
    fewer = Host(enter=("sh", "-c", 'ulimit -n 40; exec "$@"', "sh"))
    found = examined("--out", str(tmp_path), host=fewer)
    (line,) = sentences(found)
    assert found["code"] == 1 and "may have 40 files open, and a rank needs about 48" in line


@pytest.mark.full  # `test_shared_memory_fails_nccl_alone` has the findings
@as_root
def test_little_shared_memory(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm; exec "$@"'
    found = examined("--out", str(tmp_path), host=Host(enter=("unshare", "--mount", "sh", "-c", mount, "sh")))
    (line,) = sentences(found)
    assert line.startswith("limits [0]: /dev/shm has 65.5 KB free, and programs that share memory")
    assert found["code"] == 0 and "--shm-size" in found["findings"][0]["remedy"]


@compiles
@pytest.mark.parametrize(
    ("source", "line", "code"),
    [
        (NO_LOCKS, "a lock on a file in {} keeps nobody else from it, so two runs that are", 0),
        (NO_SYNC, "no rank can write a file in {} (Input/output error)", 1),
        (NO_REPLACE, "a file that is renamed in {} does not take the place of the one before it", 1),
    ],
    ids=["locks", "sync", "rename"],
)
def test_a_file_system_that_does_not_do_what_it_says(
    tmp_path: Path, source: str, line: str, code: int
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    found = examined("--out", str(out), host=Host(environment=library(tmp_path, "library", source)))
    (told,) = sentences(found)
    assert found["code"] == code and told.startswith(f"folder [0]: {line.format(out)}")
    assert list(out.iterdir()) == []


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        world = place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        found = examined("--out", str(tmp_path), host=Host(environment=world))
    (line,) = sentences(found)
    assert found["code"] == 1 and line.startswith(
        f"ports [0]: rank 0 cannot listen for the other ranks at 127.0.0.1: port {port} is taken by process "
    )
    assert "set MASTER_PORT to a free port" in found["findings"][0]["remedy"]


@as_root
def test_a_loopback_interface_that_is_down(tmp_path: Path) -> None:
    found = examined("--out", str(tmp_path), host=Host(enter=("unshare", "--net")))
    (line,) = sentences(found)
    assert found["code"] == 1 and line.startswith("ports [0]: GLOO_SOCKET_IFNAME: lo, the loopback interface")
    assert found["findings"][0]["remedy"].startswith("bring it up (ip link set lo up)")


def test_two_versions_of_the_code_and_of_the_run(tmp_path: Path) -> None:
    copied = tmp_path / "src"
    package = Path(sys.modules["meshwright"].__file__ or "").parent
    shutil.copytree(package, copied / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
    with (copied / "meshwright" / "units.py").open("a") as file:
        file.write("# another version\n")
    path = ":".join([str(copied), *filter(None, sys.path)])
    other = Host(environment={"PYTHONPATH": path}, words=("--train.lr", "1e-5"))
    words = [*SMALL, "--layout.dp", "2", "--out", str(tmp_path / "run")]
    found = together(words, [Host(), other], local=True)
    code, run = sentences(found)
    assert (
        found["code"] == 1 and code.startswith("versions [1]: meshwright is 0.") and " on rank 1 on " in code
    )
    assert run.startswith("versions [1]: the run is ")
    assert "from one wheel or one shared folder" in found["findings"][0]["remedy"]


def test_an_interface_that_a_rank_does_not_have(tmp_path: Path) -> None:
    other = Host(environment={"GLOO_SOCKET_IFNAME": "nosuch0"})
    found = together(["--out", str(tmp_path)], [Host(), other], local=True)
    waits, lacks = sentences(found)
    assert found["code"] == 1 and waits.startswith("collectives [0]: no group of all ranks: wait timeout")
    assert lacks.startswith("collectives [1]: no group of all ranks: ")
    assert lacks.endswith("Unable to find address for: nosuch0")
    assert found["findings"][1]["remedy"].startswith("see that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME")


@as_root
def test_a_file_system_that_does_not_answer_is_told_and_not_waited_for(tmp_path: Path) -> None:
    if shutil.which("fsfreeze") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("a file system is frozen by fsfreeze")
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    try:
        subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
        process = start(["--out", str(disk)], Host())
        try:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)
            process.communicate(timeout=LONGEST_S)  # no process ends whose thread waits in a frozen disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert process.returncode == 1
    assert sentences(found) == [f"folder [0]: {disk} has not answered for 20 s"]
