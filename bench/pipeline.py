"""Pipeline parallelism beside PyTorch's own, and ZB-V beside 1F1B where one link is slow.

    python bench/pipeline.py [--case pp2 delay] [--rounds 6] [--steps 2]

`pp2`       `small`, bf16, pp=2 on two processes of one thread each on a CPU, 1F1B, 8 microbatches of one
            sequence of 512 tokens, a whole training step; cut in the middle, with the embedding at one end
            and the head at the other. The sides take turns of a few steps, in the same two processes. One
            JSON object a line for each baseline, speeds in tokens per second:

    {"case": "pp2", "precision", "baseline", "ours", "theirs", "ratio", "ours_as_exact", "ratio_as_exact"}

            `ours` adds gradients of microbatches up in fp32, the default; the baselines with bf16 weights add
            them in bf16, as ours does with `precision.reduce = "bf16"`: `ours_as_exact`, which is compared
            with them like for like.

Baselines   torch.distributed.pipelining's `Schedule1F1B` over `PipelineStage`s, AdamW (fused), the gradient
            clipped by its norm over both ranks. Its stages are
              Llama         halves of transformers' Llama (SDPA), as in `throughput.py`: with weights in bf16,
                            and in fp32 under autocast
              our decoder   the very stages that our runtime runs, from the same initial weights, as plain
                            modules with bf16 parameters: with fp32 copies that AdamW updates, and with
                            nothing but those bf16 weights
            Autocast is around each stage's forward: around the whole schedule it was slower.

`delay`     four ranks whose stages wait known times instead of computing (`waiting.py`), with latency both
            ways between ranks 1 and 2, as between two nodes: a Markdown table of what ZB-V and 1F1B take, and
            of what `meshwright.schedule.simulate` says that they take. ZB-V's stages are half as long as
            1F1B's, as it has two on a rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from meshwright.comm.mesh import build_mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.model.decoder import Decoder
from meshwright.parallel.stage import DecoderStage
from meshwright.schedule import StageCost, StageLink, make, simulate
from meshwright.spec import Layout, RunSpec
from meshwright.spec.stages import stages
from meshwright.train.matmul_peak import matmul_flops_per_second
from meshwright.train.step import Trainer
from throughput import SEQ_LEN, SEQUENCES, Step, llama, small_run, timed
from waiting import run_waiting

RANKS = 2
OURS, AS_EXACT = "ours", "ours_as_exact"
CPU = torch.device("cpu")

DELAY_RANKS, DELAY_MICROBATCHES = 4, 8
DELAYS = (0.0, 0.01, 0.03)
"""Seconds of a message between ranks 1 and 2."""
DELAYED = {"1f1b": StageCost(0.06, 0.06, 0.06), "zb-v": StageCost(0.03, 0.03, 0.03)}
"""Schedule -> what one of its stages costs; a rank's are the same in all."""


# A training step ------------------------------------------------------------------------------------


def our_spec(reduce: str) -> RunSpec:
    return small_run(
        layout__pp=RANKS,
        layout__schedule="1f1b",
        layout__stages="even",
        layout__micro_batch=1,
        precision__compute="bf16",
        precision__reduce=reduce,
    )


class LlamaHalf(nn.Module):
    """A rank's share of transformers' Llama: tokens (B, T) or x (B, T, D) -> x, on the last rank logits."""

    def __init__(self, rank: int, autocast: bool = False) -> None:
        super().__init__()
        self.autocast = autocast
        torch.manual_seed(0)
        model = llama()
        decoder = model.model
        share = len(decoder.layers) // RANKS
        self.embed = decoder.embed_tokens if rank == 0 else nn.Identity()
        self.rotation = decoder.rotary_emb
        self.blocks = nn.ModuleList(decoder.layers[rank * share : (rank + 1) * share])
        self.head = nn.Sequential(decoder.norm, model.lm_head) if rank == RANKS - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            x = self.embed(x)
            rotation = self.rotation(x, position_ids=torch.arange(x.shape[1]).unsqueeze(0))
            for block in self.blocks:
                x = block(x, position_embeddings=rotation)
            out: Tensor = self.head(x)
        return out


class OurHalf(nn.Module):
    """A rank's stage of our decoder, with the trainer's values: x (B, T, D), on the last rank summed loss."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        spec, mesh = trainer.spec, trainer.mesh
        decoder = Decoder(spec.model).to(torch.bfloat16)
        parameters = dict(decoder.named_parameters())
        with torch.no_grad():
            for name, value in trainer.states.parameters():
                parameters[name].copy_(getattr(value, "to_local", lambda value=value: value)())
        stage = stages(spec.model, spec.layout, spec.data.seq_len)[mesh.pipeline.rank]
        self.stage = DecoderStage(decoder, stage, spec, mesh)
        self.own = nn.ModuleList(decoder.get_submodule(unit) for unit in stage.units)

    def forward(self, x: Tensor | None = None, **microbatch: Tensor) -> Tensor:
        return self.stage(SimpleNamespace(**microbatch), x)


def llama_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / SEQUENCES


def our_loss(total: Tensor, _targets: Tensor) -> Tensor:
    return total / (SEQ_LEN * SEQUENCES)


def clip(parameters: list[Tensor]) -> None:
    """By the norm of the whole gradient, over both ranks."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).float()
    square = norm.square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())


def their_step(half: nn.Module, masters: bool = False) -> Step:
    """A plain training loop's body around torch's schedule; `masters` are fp32 copies of bf16 weights."""
    rank, ours = dist.get_rank(), isinstance(half, OurHalf)
    stage = PipelineStage(half, rank, RANKS, CPU)
    # The loss is divided as it is made, so gradients need not be at the end.
    schedule = Schedule1F1B(stage, SEQUENCES, our_loss if ours else llama_loss, scale_grads=False)
    weights = list(half.parameters())
    updated = [weight.detach().float() for weight in weights] if masters else weights
    optimiser = torch.optim.AdamW(updated, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(batch: Batch) -> None:
        first, losses = (batch.tokens,) if rank == 0 and not ours else (), list[Tensor]()
        inputs = {key: getattr(batch, key) for key in ("tokens", "targets", "positions", "documents")}
        target = batch.targets if rank == RANKS - 1 else None
        schedule.step(*first, target=target, losses=losses, return_outputs=False, **(inputs if ours else {}))
        if masters:
            for copy, weight in zip(updated, weights, strict=True):
                copy.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        clip(updated)
        optimiser.step()
        optimiser.zero_grad()
        if masters:
            torch._foreach_copy_([weight.detach() for weight in weights], updated)
        sum(float(loss.detach()) for loss in losses)

    return step


def sides(steps: int) -> tuple[dict[str, Step], list[Batch]]:
    """Every side's step, ours first, and what they train on."""
    spec = our_spec("fp32")
    mesh = build_mesh(spec.layout, CPU, spec.model.kv_heads)
    assert mesh is not None
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
    batches = [loader.step(i) for i in range(steps)]
    loader.close()
    trainers = [Trainer(our_spec(reduce), mesh) for reduce in ("fp32", "bf16")]
    for trainer in trainers:
        trainer.initialise()
    rank, trainer = mesh.pipeline.rank, trainers[0]

    def ours(trainer: Trainer, batch: Batch) -> None:
        trainer.step(batch, 1)

    return {
        OURS: partial(ours, trainers[0]),
        AS_EXACT: partial(ours, trainers[1]),
        "our decoder, fp32 copies": their_step(OurHalf(trainer), masters=True),
        "our decoder, bf16 weights": their_step(OurHalf(trainer)),
        "Llama, bf16 weights": their_step(LlamaHalf(rank).to(torch.bfloat16)),
        "Llama, autocast": their_step(LlamaHalf(rank, autocast=True)),
    }, batches


def rows(speed: dict[str, float], gflops: float) -> Iterator[dict[str, object]]:
    for name, theirs in speed.items():
        if name not in (OURS, AS_EXACT):
            yield {
                "case": f"pp{RANKS}",
                "precision": "bf16",
                "baseline": name,
                OURS: round(speed[OURS], 1),
                "theirs": round(theirs, 1),
                "ratio": round(speed[OURS] / theirs, 3),
                AS_EXACT: round(speed[AS_EXACT], 1),
                "ratio_as_exact": round(speed[AS_EXACT] / theirs, 3),
                "matmul_gflops": round(gflops, 1),
            }


def measure_step(options: argparse.Namespace) -> None:
    steps, batches = sides(options.steps)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds + options.warmup):
        if number == options.warmup:
            gflops = matmul_flops_per_second(torch.bfloat16, CPU) / 1e9 * RANKS
        for name, step in steps.items():
            taken = timed(step, batches, CPU)
            if number >= options.warmup:
                seconds[name].append(taken)
    speed = {name: SEQ_LEN * SEQUENCES / statistics.median(times) for name, times in seconds.items()}
    if dist.get_rank() == 0:
        for row in rows(speed, gflops):
            print(json.dumps(row), flush=True)


# A slow link ----------------------------------------------------------------------------------------


def slow_link(delay: float, source: int, target: int) -> StageLink:
    """Ranks 0 and 1 are one node, 2 and 3 another."""
    return StageLink(latency=delay if {source, target} == {1, 2} else 0.0)


def delay_row(name: str, delay: float, measured: float) -> str:
    layout = delay_layout(name)
    cost = DELAYED[name]
    schedule = make(name, DELAY_RANKS, layout.chunks, DELAY_MICROBATCHES)
    simulated = simulate(schedule, cost, partial(slow_link, delay))
    busy = statistics.mean(simulated.busy)
    cells = f"{measured:.3f} | {simulated.makespan:.3f}"
    return f"| {delay * 1e3:.0f} | {name} | {cells} | {1 - busy / measured:.3f} | {simulated.bubble:.3f} |"


def delay_layout(name: str) -> Layout:
    return Layout.model_validate({"pp": DELAY_RANKS, "schedule": name})


def measure_delays(options: argparse.Namespace) -> None:
    meshes = {name: build_mesh(delay_layout(name), CPU) for name in DELAYED}
    seconds: dict[tuple[float, str], list[float]] = {(d, name): [] for d in DELAYS for name in DELAYED}
    for number in range(options.rounds + 1):
        for (delay, name), times in seconds.items():
            mesh = meshes[name]
            assert mesh is not None
            links = partial(slow_link, delay)
            run = run_waiting(mesh, name, DELAY_MICROBATCHES, DELAYED[name], links)
            if number:  # the first is warm-up
                times.append(run.seconds)
    if dist.get_rank() == 0:
        print("| delay, ms | schedule | measured, s | simulated, s | bubble | simulated bubble |")
        print("| --- | --- | --- | --- | --- | --- |")
        for (delay, name), times in seconds.items():
            print(delay_row(name, delay, statistics.median(times)), flush=True)


CASES: dict[str, tuple[int, Callable[[Any], None]]] = {
    "pp2": (RANKS, measure_step),
    "delay": (DELAY_RANKS, measure_delays),
}
"""(processes, what each does)"""


def rank_main(rank: int, store: str, case: str, options: argparse.Namespace) -> None:
    processes, measure = CASES[case]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    measure(options)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2, help="rounds of pp2 that do not count")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn of pp2")
    options = parser.parse_args()
    for case in options.case:
        with TemporaryDirectory() as folder:
            mp.spawn(rank_main, args=(f"{folder}/store", case, options), nprocs=CASES[case][0])


if __name__ == "__main__":
    main()
