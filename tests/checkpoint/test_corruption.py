"""500 corruptions of a checkpoint of two ranks: none loads, each is named, and none runs code."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from faults import same, tensors, write_root, zeros_like
from meshwright.checkpoint import CheckpointStore, manifest
from meshwright.comm.control import Control
from meshwright.spec import UserError

FILES = ("manifest.json", "part-00000.json", "rank-00000.bin", "rank-00001.bin")
FORBIDDEN = {
    "compile", "ctypes.dlopen", "exec", "import", "marshal.loads", "os.exec", "os.fork", "os.posix_spawn",
    "os.system", "pickle.find_class", "socket.connect", "subprocess.Popen",
}  # fmt: skip


def of_rank(rank: int) -> dict[str, torch.Tensor]:
    """Tensors that only this rank holds; both ranks' files are equally long."""
    return {f"{name}/{rank}": tensor for name, tensor in tensors(10 + rank).items()}


def everything() -> dict[str, torch.Tensor]:
    return of_rank(0) | of_rank(1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 10, and one of step 20 with other values."""
    directory, keys = tmp_path_factory.mktemp("whole"), dist.HashStore()

    def save(rank: int) -> None:
        store = CheckpointStore(directory, 2, Control("test", rank, 2, lambda: keys, timedelta(seconds=60)))
        store.save(10, of_rank(rank), {"step": 10})
        store.save(20, {name: tensor.logical_not() if tensor.dtype == torch.bool else tensor + 1
                        for name, tensor in of_rank(rank).items()}, {"step": 20})  # fmt: skip
        store.close()

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.name for path in (directory / "step-00000010").iterdir()} == set(FILES)
    return directory


Draw = random.Random
Change = Callable[[Path, Draw], tuple[str, ...]]
"""Corrupts the checkpoint in a directory; returns the files that an error may name."""


def flip(checkpoint: Path, draw: Draw) -> tuple[str, ...]:
    file = draw.choice(FILES)
    data = bytearray((checkpoint / file).read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    (checkpoint / file).write_bytes(data)
    return (file,)


def zero(checkpoint: Path, draw: Draw) -> tuple[str, ...]:
    file = draw.choice(FILES)
    data = bytearray((checkpoint / file).read_bytes())
    while True:
        start, length = draw.randrange(len(data)), draw.choice((1, 16, 512, 4096))
        if any(data[start : start + length]):
            break
    data[start : start + length] = bytes(len(data[start : start + length]))
    (checkpoint / file).write_bytes(data)
    return (file,)


def cut(checkpoint: Path, draw: Draw) -> tuple[str, ...]:
    file = draw.choice(FILES)
    data = (checkpoint / file).read_bytes()
    (checkpoint / file).write_bytes(data[: draw.randrange(len(data))])
    return (file,)


def swap(checkpoint: Path, draw: Draw) -> tuple[str, ...]:
    """Exchange two files of the checkpoint, or one with that of another step."""
    first, second = draw.sample(FILES, 2)
    if draw.random() < 0.5:
        shutil.copy(checkpoint.parent / "step-00000020" / first, checkpoint / first)
        return first, "step"
    data = (checkpoint / first).read_bytes()
    (checkpoint / first).write_bytes((checkpoint / second).read_bytes())
    (checkpoint / second).write_bytes(data)
    return first, second


def swap_pieces(checkpoint: Path, draw: Draw) -> tuple[str, ...]:
    """Exchange the bytes of two equally long pieces of the two ranks' files."""
    part = json.loads((checkpoint / "part-00000.json").read_text())
    names = [name for name, pieces in part["tensors"].items() if name.endswith("/0") and pieces]
    name = draw.choice([name for name in names if name != "optim/mask/0"])
    rows = [part["tensors"][f"{name[:-2]}/{rank}"][0] for rank in (0, 1)]
    contents = [bytearray((checkpoint / row[2]).read_bytes()) for row in rows]
    parts = [bytes(data[row[3] : row[3] + row[4]]) for data, row in zip(contents, rows, strict=True)]
    for data, row, other in zip(contents, rows, reversed(parts), strict=True):
        data[row[3] : row[3] + row[4]] = other
        (checkpoint / row[2]).write_bytes(data)
    return FILES[2:]


def link(checkpoint: Path, draw: Draw) -> tuple[str, ...]:
    """Put a link in the place of a file or of the directory, to outside, even to the very same content."""
    file = draw.choice(FILES)
    outside = checkpoint.parent.parent / "outside"
    shutil.copytree(checkpoint, outside, dirs_exist_ok=True)
    target = draw.choice(
        (outside / file, Path("../../outside") / file, Path("/etc/passwd"), Path("/dev/zero"))
    )
    (checkpoint / file).unlink()
    (checkpoint / file).symlink_to(target)
    return (file,)


def leaves(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every number and text in a JSON value."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list):
            yield from leaves(value)
        else:
            yield node, key


def edit(node: Any, draw: Draw) -> None:
    container, key = draw.choice(list(leaves(node)))
    value = container[key]
    others: list[Any] = [None, [], {}, "", "../../etc/passwd", -1, 1 << 70, 0.5, True]
    if isinstance(value, int):
        others += [value + 1, value - 1, value ^ 64, str(value)]
    else:
        others += [
            value + "x",
            value[:-1],
            "/" + value,
            value.swapcase() if value.lower() != value else "int32",
        ]
    # True equals 1, but an int must be one
    container[key] = draw.choice(
        [other for other in others if other != value or type(other) is not type(value)]
    )


def edit_root(checkpoint: Path, draw: Draw) -> tuple[str, ...]:
    """Change what the root says of tensors, parts or the step; its hash is right."""
    body = json.loads((checkpoint / "manifest.json").read_text())["body"]
    edit({key: body[key] for key in ("tensors", "spreads", "parts", "state")}, draw)
    write_root(checkpoint, body)
    return (*FILES, "tensor")


def edit_part(checkpoint: Path, draw: Draw) -> tuple[str, ...]:
    """Change what a part says of the pieces; its hash in the root, and the root's, are right."""
    part = json.loads((checkpoint / "part-00000.json").read_text())
    edit(part, draw)
    text = json.dumps(part)
    (checkpoint / "part-00000.json").write_text(text)
    body = json.loads((checkpoint / "manifest.json").read_text())["body"]
    body["parts"][0][1:] = [len(text), hashlib.sha256(text.encode()).hexdigest()]
    write_root(checkpoint, body)
    return FILES[1:]


KINDS: list[Change] = [flip, zero, cut, swap, swap_pieces, link, edit_root, edit_part]


@contextmanager
def watched(directory: Path) -> Iterator[list[str]]:
    """Collect what runs code, connects or opens a file outside of `directory`."""
    found: list[str] = []
    own = {
        str(hint)
        for kind in vars(manifest).values()
        for hint in getattr(kind, "__annotations__", {}).values()
    }
    watching, compiled, own_thread = True, "", threading.get_ident()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal compiled
        if not watching or threading.get_ident() != own_thread:
            return
        if event == "compile":
            compiled = bytes(arguments[0] or b"").decode(errors="replace")
        if event in ("compile", "exec") and compiled in own:
            return  # an error looks up the type of a field in the program's own text
        if event in FORBIDDEN:
            found.append(f"{event} {arguments}")
        elif event == "open" and not str(arguments[0]).startswith(str(directory)):
            found.append(f"open {arguments[0]}")

    sys.addaudithook(watch)  # hooks stay for the life of the process: this one is switched off below
    try:
        yield found
    finally:
        watching = False


@pytest.mark.parametrize("kind", KINDS)
def test_no_corruption_goes_unseen(whole: Path, tmp_path: Path, kind: Change) -> None:
    draw = random.Random(kind.__name__)
    directory = tmp_path / "checkpoints"
    shutil.copytree(whole, directory)
    target = zeros_like(everything())
    CheckpointStore(directory, 2).load(10, target)  # it is good, and what a load imports is imported
    assert same(target, everything())
    zeros = zeros_like(target)
    for number in range(63):
        checkpoint = directory / "step-00000010"
        named = kind(checkpoint, draw)
        target = zeros_like(target)
        with watched(directory) as ran:
            try:
                CheckpointStore(directory, 2).load(10, target)
                told = ""
            except UserError as error:
                told = str(error)
        assert told, f"{kind.__name__} {number} of {named} was loaded"
        assert any(name in told for name in named), f"{kind.__name__} {number} of {named}: {told}"
        assert same(target, zeros) and ran == []
        shutil.rmtree(checkpoint)
        shutil.copytree(whole / "step-00000010", checkpoint)
