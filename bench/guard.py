"""Seconds of the guard's checks beside those of a step and of the copy that a save makes, on two replicas.

    python bench/guard.py [--preset base] [--tokens 1024] [--rounds 5]

Each of two processes of one thread holds the preset whole, with its moments (dp = 2, ZeRO-0). "vote" compares
the states of both, "finite" looks for a number that is not finite, "stage" copies the state to host memory,
and "step" trains on `--tokens` tokens. They take turns. One JSON object, with the time of votes every 100
steps as a share of theirs, and that of vote and finite as a multiple of the copy's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from tempfile import TemporaryDirectory

import torch
import torch.multiprocessing as mp

from meshwright.checkpoint.save_plan import SavePlan, describe
from meshwright.checkpoint.staging import HostImage
from meshwright.comm.mesh import build_mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.spec import load
from meshwright.train import state
from meshwright.train.guard.nonfinite import bad_state
from meshwright.train.guard.vote import Vote
from meshwright.train.step import Trainer
from world import join


def measure(rank: int, store: str, preset: str, tokens: int, rounds: int) -> None:
    torch.set_num_threads(1)
    device = join("cpu", store, rank, 2)
    given = {
        "model.preset": preset,
        "layout.dp": 2,
        "data.corpus": "synthetic",
        "data.seq_len": 512,
        "train.batch_tokens": tokens,
    }
    spec = load(None, [(key, str(value)) for key, value in given.items()])
    mesh = build_mesh(spec.layout, device)
    assert mesh is not None
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, 2)
    batch, vote, image = loader.step(0), Vote(trainer), HostImage()
    loader.close()
    tensors = state.tensors(trainer)
    plan = SavePlan(mesh.control)
    plan.agree(describe(tensors, rank))
    numbers = iter(range(1, rounds + 2))
    work = {
        "step": lambda: trainer.step(batch, next(numbers)),
        "vote": vote,
        "finite": lambda: bad_state(trainer),
        "stage": lambda: image.stage(plan.own_share(tensors)),
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, each in work.items():
            mesh.control.barrier()
            start = time.perf_counter()
            each()
            taken[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(times[1:]) for name, times in taken.items()}
    row = {
        "parameters": spec.model.parameters,
        "state_bytes": sum(3 * unit.stored.nbytes for unit in trainer.states.units),
        "tokens": tokens,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "votes_every_100_steps": round(seconds["vote"] / (100 * seconds["step"]), 6),
        "checks_to_copy": round((seconds["vote"] + seconds["finite"]) / seconds["stage"], 2),
    }
    if rank == 0:
        print(json.dumps(row))
    mesh.control.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", options.preset, options.tokens, options.rounds)
        mp.spawn(measure, arguments, nprocs=2)


if __name__ == "__main__":
    main()
