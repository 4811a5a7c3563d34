"""Seconds of a step and bytes of activations with offloading beside those without.

    python bench/activation_offload.py [--preset small] [--layers 6] [--tokens 1024] [--rounds 9]

Two processes of one thread hold the preset, one with each way, and take turns step by step; with --device
cuda they share a GPU. On a CPU a copy is one in memory, which nothing hides, so what is measured there is
the cost of the hooks and of these copies. "processor" are seconds of the processor, which other programs
change less; "held" are the bytes of activations between forward and backward by the planner, without the
host's, "offloaded" those there, and "device" the most that torch allocated on a GPU. Prints one JSON object
for each policy, with the quartiles of the ratios of steps that followed each other.
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

from meshwright.planner.activations import activations
from meshwright.spec import RunSpec, load
from world import join, trainer_of

SEQ_LEN = 512
WAYS = ("none", "host")


def spec_of(options: argparse.Namespace, policy: str, offload: str) -> RunSpec:
    given = {
        "model.preset": options.preset,
        "model.layers": options.layers,
        "data.corpus": "synthetic",
        "data.seq_len": SEQ_LEN,
        "train.batch_tokens": options.tokens,
        "layout.micro_batch": options.tokens // SEQ_LEN,
        "recompute.policy": policy,
        "train.offload_activations": offload,
    }
    return load(None, [(key, str(value)) for key, value in given.items()])


def take_steps(told: Connection, options: argparse.Namespace, policy: str, offload: str, store: str) -> None:
    """Take a step for each message, and answer with its seconds; at the end with bytes."""
    torch.set_num_threads(1)
    device = join(options.device, store, 0, 1)
    spec = spec_of(options, policy, offload)
    trainer, batch = trainer_of(spec, device)
    number = 0
    while told.recv():
        number += 1
        start = time.perf_counter(), time.process_time()
        trainer.step(batch, number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        told.send((time.perf_counter() - start[0], time.process_time() - start[1]))
    most = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    away = trainer.offload.host.most if trainer.offload else 0
    told.send({"held": activations(spec).kept, "offloaded": away, "device": most})


def compare(options: argparse.Namespace, policy: str) -> dict[str, object]:
    """Both ways of one policy."""
    context = mp.get_context("spawn")
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with TemporaryDirectory() as folder:
        ends = {}
        for way in WAYS:
            ends[way], theirs = context.Pipe()
            store = str(Path(folder) / way)
            context.Process(target=take_steps, args=(theirs, options, policy, way, store)).start()
        for turn in range(options.rounds + 1):
            for way, end in ends.items():
                end.send(True)
                both = end.recv()
                if turn:  # the first step touches all pages
                    taken[way].append(both)
        found: dict[str, dict[str, object]] = {}
        for way, end in ends.items():
            end.send(False)
            found[way] = end.recv()
    ratios = {}
    for place, kind in enumerate(("seconds", "processor")):
        for way in WAYS:
            found[way][kind] = [round(each[place], 4) for each in taken[way]]
        pairs = zip(taken["host"], taken["none"], strict=True)
        quartiles = statistics.quantiles((away[place] / here[place] for away, here in pairs), n=4)
        ratios[kind] = [round(each, 3) for each in quartiles]
    return {"policy": policy, **found, "quartiles of ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=2 * SEQ_LEN)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--policies", nargs="+", default=["none", "selective", "full"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds: {options.rounds} is too few for quartiles; give 2 or more")
    for policy in options.policies:
        print(json.dumps(compare(options, policy)), flush=True)


if __name__ == "__main__":
    main()
