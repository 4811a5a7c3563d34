"""Memory of a rank while it takes its part of a trained model: `train --from`, without the training.

    python bench/load_memory.py --shape 2B --ranks 0 1 -- --layout.dp 2 --layout.zero 3
    python bench/load_memory.py --shape 70B --holes --ranks 17 -- --layout.dp 16 --layout.tp 8 --layout.zero 3

An HF folder of random numbers is written, or with --holes one of files that have headers alone and read as
zeros, whatever the disk has room for. Taking weights sends nothing, so each rank is a process by itself, one
after the other, in a world that sends nothing: what it holds and reads is as in a run. Flags after -- are
those of `train`; parameters are bf16 unless they say otherwise. `--format` is that of the files: the folder's
safetensors, a pytorch_model.bin, or a directory of torch.distributed.checkpoint.

One JSON object a rank. `share` are the bytes that the rank holds; `besides` is the peak of anonymous memory
above those, the modules, and the trainer before it began: by VmHWM, which is reset first, less what is mapped
of files, or where files are mapped (`bin`) by RssAnon, polled every millisecond. `read` is what the dry run
says that it reads, `at_a_time` the most of it at once.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from hf_folders import DTYPES, SHAPES, write_folder

FORMATS = "safetensors", "bin", "dcp"
GIVEN = {"--precision.compute": "bf16", "--precision.master": "bf16", "--data.corpus": "synthetic",
         "--data.seq_len": "16", "--train.batch_tokens": "2048"}  # fmt: skip


def memory(name: str) -> int:
    """Bytes of a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextmanager
def peak_of(found: dict[str, int], mapped: bool) -> Iterator[None]:
    """Note the peak of anonymous memory in a block."""
    done, most = threading.Event(), [memory("RssAnon")]

    def poll() -> None:
        while not done.is_set():
            most[0] = max(most[0], memory("RssAnon"))
            time.sleep(1e-3)

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    watch = threading.Thread(target=poll)
    if mapped:
        watch.start()
    yield
    done.set()
    exact = memory("VmHWM") - memory("RssFile") - memory("RssShmem")
    if mapped:
        watch.join()
    found["peak"] = most[0] if mapped else exact


def one_rank(source: str, rank: int, mapped: bool, flags: list[str]) -> dict[str, int]:
    """Take the part of a rank, as the first step of a run does; its figures."""
    from meshwright.api.source import keys_of_source
    from meshwright.checkpoint.save_plan import local_chunks
    from meshwright.checkpoint.weights import held_rectangles
    from meshwright.comm.mesh import build_mesh
    from meshwright.dryrun.fake_world import FakeGroups, fake_world
    from meshwright.spec.load import load
    from meshwright.train.step import Trainer
    from meshwright.weights.initial_weights import open_weights

    words = GIVEN | dict(zip(flags[::2], flags[1::2], strict=True))
    overrides = [(word.removeprefix("--"), text) for word, text in words.items()]
    spec = load(None, [*keys_of_source(source), *overrides])
    found: dict[str, int] = {"rank": rank, "world": spec.layout.world_size}
    with fake_world(spec.layout.world_size, rank):
        mesh = build_mesh(spec.layout, torch.device("cpu"), spec.model.kv_heads, FakeGroups("cpu"))
        assert mesh is not None
        trainer, weights = Trainer(spec, mesh), open_weights(spec)
        assert weights is not None
        held = [chunk for name, tensor in trainer.held.items() for chunk in local_chunks(name, tensor)]
        found["share"] = sum(math.prod(each.local_shape) * each.local.element_size() for each in held)
        reading = weights.reading(held_rectangles(trainer.held))
        found |= {"read": reading.bytes, "at_a_time": reading.at_a_time}
        for each in held:
            each.local.zero_()  # its pages are there from now on
        before, started = memory("RssAnon"), time.monotonic()
        with peak_of(found, mapped):
            trainer.initialise(weights)
        found["besides"] = found.pop("peak") - before
        found["seconds"] = round(time.monotonic() - started)
    return found


def rewritten(folder: Path, kind: str) -> Path:
    """The folder's tensors in files of another format, in place of its own."""
    if kind == "safetensors":
        return folder
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    for file in files:
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    if kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        from torch.distributed.checkpoint import save

        save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


def main() -> None:
    """Print a JSON object for each rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="300MB")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--format", choices=FORMATS, default="safetensors")
    parser.add_argument("--holes", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0])
    parser.add_argument("--source", help="a folder that is there, in place of one that is written")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        about: dict[str, Any] = {"shape": options.shape, "format": options.format}
        source = Path(options.source or f"{scratch}/hf")
        if options.source is None:
            about |= write_folder(source, SHAPES[options.shape], DTYPES[options.dtype], holes=options.holes)
            rewritten(source, options.format)
        for rank in options.ranks:
            call = f"import json, load_memory as it; print(json.dumps(it.one_rank({str(source)!r}, {rank}, "
            call += f"{options.format == 'bin'}, {options.flags!r})))"
            done = subprocess.run(
                [sys.executable, "-c", call],
                cwd=Path(__file__).parent,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            print(json.dumps(about | json.loads(done.stdout.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main()
