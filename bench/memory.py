"""Bytes that one of 4 ranks holds for parameters, gradients and optimiser, against the formulas of ZeRO.

    python bench/memory.py [--preset small] [--ranks 4]

Rajbhandari et al. 2020 (ZeRO, §3 and Figure 1) give for P parameters over N ranks, in mixed precision:

    stage 0   (p + g + K) P                 stage 2   p P + (g + K) P / N
    stage 1   (p + g) P + K P / N           stage 3   (p + g + K) P / N

Here p = 2 (the bf16 copy that computes), K = 12 (fp32 master weights and Adam's two moments) and g = 4:
gradients are summed in fp32, where the paper keeps them in fp16. In stage 3 p = 0: a unit's bf16 copy is made
from the master shards when it is needed, so it is a buffer and not a state.

"states" are the storages of all live tensors of the process, each once, at the end of a step's backward with
two microbatches, with gradients at the most that they took at any time of the step. "buffers" are on top: the
most that units on their way (gathered parameters that are laid out, gradients that are packed for the wire)
took together. One JSON object a line; exit code 1 when a stage's states are off by more than 5%.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterable
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from meshwright.comm.mesh import build_mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.parallel.flat_param import ParamSlot
from meshwright.parallel.fsdp_unit import Unit
from meshwright.spec import load
from meshwright.train.step import Trainer

P_BYTES, G_BYTES, K_BYTES = 2, 4, 12
TOLERANCE = 0.05


def live_bytes() -> int:
    """Bytes of the storages of all tensors that Python can reach, each storage once."""
    gc.collect()
    sizes = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and found.device.type != "meta":
            storage = found.untyped_storage()
            sizes[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(sizes.values())


class Watch:
    """Looks at the units whenever a gather ends or a gradient is packed."""

    def __init__(self, units: list[Unit], stage: int) -> None:
        self.units, self.stage = units, stage
        self.most_gradients = self.most_buffers = 0
        for unit in units:
            unit.finish_gather = self._gather(unit.finish_gather)  # type: ignore[method-assign]
            unit.pack = self._pack(unit.pack)  # type: ignore[method-assign]

    def _gather(self, honest: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            under_way = [u._gathering[1] for u in self.units if u._gathering and u.shards]
            arriving = _bytes(message for message in under_way if message is not None)
            honest()  # lays out what arrived encoded: for a moment it is there twice
            self._look(arriving)

        return run

    def _pack(self, honest: Callable[[ParamSlot, Tensor], None]) -> Callable[[ParamSlot, Tensor], None]:
        def run(slot: ParamSlot, grad: Tensor) -> None:
            honest(slot, grad)
            self._look(0)

        return run

    def _look(self, arriving: int) -> None:
        self.most_gradients = max(self.most_gradients, self.gradients())
        self.most_buffers = max(self.most_buffers, arriving + self.buffers())

    def gradients(self) -> int:
        """Bytes of gradients that wait for the optimiser: whole in stages 0 and 1, shards in 2 and 3."""
        kept = (u.packed if self.stage < 2 else u.gradient for u in self.units)
        return _bytes(tensor for tensor in kept if tensor is not None)

    def buffers(self) -> int:
        packed = _bytes(u.packed for u in self.units if self.stage >= 2 and u.packed is not None)
        return packed + (_bytes(u.full for u in self.units) if self.stage == 3 else 0)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def formula(parameters: int, stage: int, ranks: int) -> float:
    """Bytes of states on one rank."""
    whole = {0: P_BYTES + G_BYTES + K_BYTES, 1: P_BYTES + G_BYTES, 2: P_BYTES, 3: 0}[stage]
    shared = {0: 0, 1: K_BYTES, 2: G_BYTES + K_BYTES, 3: G_BYTES + K_BYTES}[stage]
    return parameters * (whole + shared / ranks)


def measure(rank: int, ranks: int, store: str, preset: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    failed = False
    for stage in range(4):
        flags = {
            "model.preset": preset,
            "data.corpus": "synthetic",
            "data.seq_len": 64,
            "train.batch_tokens": 64 * 2 * ranks,
            "layout.dp": ranks,
            "layout.zero": stage,
            "layout.micro_batch": 1,
            "precision.compute": "bf16",
        }
        spec = load(None, [(key, str(value)) for key, value in flags.items()])
        mesh = build_mesh(spec.layout, torch.device("cpu"))
        assert mesh is not None
        loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
        batch = loader.step(0)
        loader.close()
        before = live_bytes()
        trainer = Trainer(spec, mesh)
        trainer.initialise()
        watch = Watch(trainer.states.units, stage)
        trainer.step(batch, 1)
        trainer.gradients(batch)
        gradients = _bytes({id(u.gradient): u.gradient for u in trainer.states.units}.values())
        packed = {id(u.packed): u.packed for u in trainer.states.units if u.packed is not u.gradient}
        gradients += _bytes(tensor for tensor in packed.values() if tensor is not None)
        states = live_bytes() - before - gradients - watch.buffers() + watch.most_gradients
        expected = formula(spec.model.parameters, stage, ranks)
        off = states / expected - 1
        failed |= abs(off) > TOLERANCE
        if rank == 0:
            row = {"stage": stage, "ranks": ranks, "parameters": spec.model.parameters, "states": states}
            row |= {"formula": round(expected), "off": round(off, 4), "buffers": watch.most_buffers}
            row |= {"state_bytes_per_parameter": round(states / spec.model.parameters, 3)}
            print(json.dumps(row), flush=True)
        del trainer, watch
    dist.destroy_process_group()
    if failed:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a rank by ZeRO stage, against the formulas")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        arguments = (options.ranks, f"{folder}/store", options.preset)
        mp.spawn(measure, args=arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
