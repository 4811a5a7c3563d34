"""Seconds of a step and bytes of a process with moments in a mapped file beside those without.

    python bench/offload.py [--preset small] [--tokens 512] [--rounds 9] [--offload disk] [--dir FOLDER]

Two processes of one thread hold the preset, one with each way, and take turns step by step; with --device
cuda they share a GPU. "anonymous" are bytes in memory that belong to no file (RssAnon), "mapped" those of
files (RssFile), "device" the most that torch allocated there. Prints one JSON object with the seconds of each
step, and the median of the ratios of steps that followed each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.multiprocessing as mp

from meshwright.spec import load
from world import join, trainer_of

SEQ_LEN = 512


def resident() -> dict[str, int]:
    """Bytes of this process in memory, by kind."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return {"anonymous": int(found["RssAnon"]) * 1024, "mapped": int(found["RssFile"]) * 1024}


def take_steps(told: Connection, options: argparse.Namespace, offload: str, store: str) -> None:
    """Take a step for each message, and answer with its seconds; at the end with bytes."""
    torch.set_num_threads(1)
    device = join(options.device, store, 0, 1)
    given = {
        "model.preset": options.preset,
        "data.corpus": "synthetic",
        "data.seq_len": SEQ_LEN,
        "train.batch_tokens": options.tokens,
        "train.offload": offload,
    }
    if offload == "disk" and options.dir:
        given["train.offload_dir"] = options.dir
    spec = load(None, [(key, str(value)) for key, value in given.items()])
    trainer, batch = trainer_of(spec, device)
    number = 0
    while told.recv():
        number += 1
        start = time.perf_counter()
        trainer.step(batch, number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        told.send(time.perf_counter() - start)
    most = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    held = trainer.optimiser.memory()
    told.send({**resident(), "device": most, **held, "parameters": spec.model.parameters})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--tokens", type=int, default=SEQ_LEN)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--offload", default="disk", choices=["disk", "host"])
    parser.add_argument("--dir", help="folder of the file; by default that for temporary files")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    context = mp.get_context("spawn")
    seconds: dict[str, list[float]] = {"none": [], options.offload: []}
    with TemporaryDirectory() as folder:
        ends = {}
        for offload in seconds:
            ends[offload], theirs = context.Pipe()
            store = str(Path(folder) / offload)
            context.Process(target=take_steps, args=(theirs, options, offload, store)).start()
        for turn in range(options.rounds + 1):
            for offload, end in ends.items():
                end.send(True)
                taken = end.recv()
                if turn:  # the first step touches all pages
                    seconds[offload].append(round(taken, 4))
        found = {}
        for offload, end in ends.items():
            end.send(False)
            found[offload] = {"seconds": seconds[offload], **end.recv()}
    pairs = zip(seconds[options.offload], seconds["none"], strict=True)
    ratio = statistics.median(away / here for away, here in pairs)
    print(json.dumps({"preset": options.preset, "tokens": options.tokens, **found, "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
