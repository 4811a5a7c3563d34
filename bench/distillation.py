"""Held-out loss of a student that learns from a teacher, and of the same student trained alone.

The data are those of `examples/first.toml`, in shorter samples of fewer tokens. A teacher that is larger and
trained for longer answers about the samples of each seed once (`meshwright distil`), and the student learns
from these answers. Alone it takes as many tokens; then as many steps as take the distilled run's time; and
then as many as take that time and the teacher's pass over the samples, as if no other student or epoch shared
it. These times are medians of processor seconds on one thread, of steps of both and of passes that take turns
in one process, so that other programs slow all of them down. Runs that have ended are not repeated.

    python bench/distillation.py --out curves-distil --seeds 0,1,2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright import api
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.infer.soft_target_source import soft_targets_of
from meshwright.rank.world import mesh_of
from meshwright.spec import RunSpec, load
from meshwright.train.parts import Sources
from meshwright.train.step import Trainer

FIRST = Path(__file__).parent.parent / "examples" / "first.toml"
COMMON = {
    "layout.dp": 1, "precision.compute": "fp32", "model.vocab_size": 1024, "data.seq_len": 128,
    "train.batch_tokens": 1024, "train.warmup_steps": 10, "train.eval_every": 0, "train.eval_tokens": 20000,
    "recovery.vote_every": 0, "train.log_every": 50,
}  # fmt: skip
STUDENT = {"model.layers": 2, "model.hidden": 64, "model.ffn": 176}
TEACHER = {"model.layers": 2, "model.hidden": 128, "model.ffn": 352}
TAUGHT = {"distil.top_k": 32, "distil.weight": 1.0}


def spec_of(**flags: object) -> RunSpec:
    """The first example's run with these flags, dots written as double underscores."""
    given = COMMON | {key.replace("__", "."): value for key, value in flags.items()}
    return load(FIRST, [(key, str(value)) for key, value in given.items()])


def named(flags: dict[str, Any]) -> dict[str, object]:
    """Dotted keys as names of arguments."""
    return {key.replace(".", "__"): value for key, value in flags.items()}


def trained(out: Path, seed: int, steps: int, **flags: object) -> float:
    """Held-out loss, in nats a token, of a run that is not repeated where it has ended."""
    if not (out / "result.json").is_file():
        api.train(spec_of(train__seed=seed, train__steps=steps, **flags), out=out, quiet=True)
    return float(json.loads((out / "result.json").read_text(encoding="utf-8"))["val_loss"])


def costs(asking: RunSpec, reading: RunSpec, out: Path, rounds: int) -> dict[str, float]:
    """Median processor seconds of a step alone, of one that reads answers, and of the teacher's pass."""
    alone = asking.model_copy(update={"distil": None})
    found: dict[str, list[float]] = defaultdict(list)
    with mesh_of(asking) as mesh:
        corpus = open_corpus(asking)
        loader = Loader(corpus, asking, 0, 1)
        trainers = {
            "alone": Trainer(alone, mesh),
            "distilled": Trainer(reading, mesh, sources=Sources(soft_targets_of(reading, mesh, corpus, out))),
        }
        turns: dict[str, Callable[[Batch], Any]] = {}
        for name, trainer in trainers.items():
            trainer.initialise()
            turns[name] = partial(_step, trainer)
        ask = soft_targets_of(asking, mesh, corpus, out)
        assert ask is not None
        turns["teacher's pass"] = ask
        for number in range(rounds):
            batch = loader.step(number)
            for name, turn in turns.items():
                begun = time.process_time()
                turn(batch)
                found[name].append(time.process_time() - begun)
        loader.close()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _step(trainer: Trainer, batch: Batch) -> None:
    trainer.expect(batch)
    trainer.step(batch, 1)


def one_seed(out: Path, teacher: Path, seed: int, steps: int) -> dict[str, tuple[int, float]]:
    """Steps and held-out loss of each way to train the student."""
    alone, taught, answers = named(STUDENT), named(TAUGHT), out / f"answers-{seed}"
    common = {"train__seed": seed, "train__steps": steps, **alone, **taught}
    asking, reading = spec_of(distil__teacher=teacher, **common), spec_of(distil__logits=answers, **common)
    if not answers.exists():
        api.distil(asking, answers)
    seconds = costs(asking, reading, out, min(steps, 60))
    print(seed, {name: f"{1e3 * value:.1f} ms" for name, value in seconds.items()}, flush=True)
    ratio, share = (seconds[name] / seconds["alone"] for name in ("distilled", "teacher's pass"))
    found: dict[str, tuple[int, float]] = {}
    for name, count, flags in (
        ("distilled", steps, {"distil__logits": answers, **taught}),
        ("alone, the same tokens", steps, {}),
        ("alone, the same time", round(steps * ratio), {}),
        ("alone, the same time and the teacher's pass", round(steps * (ratio + share)), {}),
    ):
        loss = trained(out / f"{name.replace(' ', '-')}-{seed}", seed, count, **alone, **flags)
        found[name] = count, loss
        print(seed, name, found[name], flush=True)
    return found


def main() -> None:
    """Train the teacher and the students, and print a table and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--teacher-steps", type=int, default=1500)
    given = parser.parse_args()
    torch.set_num_threads(1)
    teacher = given.out / "teacher"
    known = trained(teacher, 100, given.teacher_steps, **named(TEACHER))
    print(f"teacher: {known:.4f} nats a token", flush=True)
    rows = defaultdict(list)
    for seed in map(int, given.seeds.split(",")):
        for name, row in one_seed(given.out, teacher, seed, given.steps).items():
            rows[name].append(row)
    print("\n| student | steps | held-out loss | mean |\n| --- | --- | --- | --- |")
    for name, listed in rows.items():
        steps, losses = zip(*listed, strict=True)
        each = ", ".join(f"{loss:.3f}" for loss in losses)
        print(f"| {name} | {', '.join(map(str, steps))} | {each} | {statistics.mean(losses):.3f} |")
    print(json.dumps({"teacher": known, "rows": rows}))


if __name__ == "__main__":
    main()
