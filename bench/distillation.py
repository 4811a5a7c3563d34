"""Held-out loss of a student that learns from a teacher, and of the same student trained alone.

The data are those of `examples/first.toml`, in shorter samples of fewer tokens. A teacher that is larger and
trained for longer answers about the samples of each seed once (`meshwright distil`), and the student learns
from these answers. Alone it takes as many tokens, and then as many more steps as the answers cost, the
teacher's pass with them, as if no other student or epoch shared it. A cost is the tenth of a run's steps in
order of the processor seconds that they took, on one thread, so that other programs count little.

    python bench/distillation.py --out curves-distil --seeds 0,1,2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from meshwright import api
from meshwright.spec import RunSpec, load
from meshwright.train.step import Trainer
from meshwright.train.teacher import Teacher

FIRST = Path(__file__).parent.parent / "examples" / "first.toml"
COMMON = {
    "layout.dp": 1, "precision.compute": "fp32", "model.vocab_size": 1024, "data.seq_len": 128,
    "train.batch_tokens": 1024, "train.warmup_steps": 10, "train.eval_every": 0, "train.eval_tokens": 20000,
    "recovery.vote_every": 0, "train.log_every": 50,
}  # fmt: skip
STUDENT = {"model.layers": 2, "model.hidden": 64, "model.ffn": 176}
TEACHER = {"model.layers": 2, "model.hidden": 128, "model.ffn": 352}
TAUGHT = {"distil.top_k": 32, "distil.weight": 0.7}


def spec_of(**flags: object) -> RunSpec:
    """The first example's run with these flags, dots written as double underscores."""
    given = COMMON | {key.replace("__", "."): value for key, value in flags.items()}
    return load(FIRST, [(key, str(value)) for key, value in given.items()])


def named(flags: dict[str, Any]) -> dict[str, object]:
    """Dotted keys as names of arguments."""
    return {key.replace(".", "__"): value for key, value in flags.items()}


@contextmanager
def seconds_of(owner: type, name: str) -> Iterator[list[float]]:
    """Processor seconds of each call of a method meanwhile."""
    found: list[float] = []
    method: Callable[..., Any] = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            found.append(time.process_time() - begun)

    with patch.object(owner, name, timed):
        yield found


def trained(out: Path, seed: int, steps: int, **flags: object) -> tuple[float, float]:
    """Held-out loss, in nats a token, and processor seconds a step."""
    spec = spec_of(train__seed=seed, train__steps=steps, **flags)
    with seconds_of(Trainer, "step") as seconds:
        result = api.train(spec, out=out, quiet=True)
    return float(result["val_loss"]), tenth(seconds)


def tenth(seconds: list[float]) -> float:
    """The value that nine tenths are above."""
    return sorted(seconds)[len(seconds) // 10]


def one_seed(out: Path, teacher: Path, seed: int, steps: int) -> dict[str, tuple[int, float, float]]:
    """Steps, held-out loss and processor seconds a step of each way to train the student."""
    alone, taught, answers = named(STUDENT), named(TAUGHT), out / f"answers-{seed}"
    asked = spec_of(train__seed=seed, train__steps=steps, distil__teacher=teacher, **alone, **taught)
    with seconds_of(Teacher, "__call__") as passes:
        api.distil(asked, answers)
    found: dict[str, tuple[int, float, float]] = {}

    def run(name: str, steps: int, **flags: object) -> None:
        found[name] = (steps, *trained(out / f"{name}-{seed}", seed, steps, **alone, **flags))

    run("alone", steps)
    run("distilled", steps, distil__logits=answers, **taught)
    cost = max(found["distilled"][2], found["alone"][2]) + tenth(passes)
    run("alone, for the same time", round(steps * cost / found["alone"][2]))
    return found


def main() -> None:
    """Train the teacher and the students, and print a table and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--teacher-steps", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)
    teacher = given.out / "teacher"
    known = trained(teacher, 100, given.teacher_steps, **named(TEACHER))[0]
    print(f"teacher: {known:.4f} nats a token", flush=True)
    rows = defaultdict(list)
    for seed in map(int, given.seeds.split(",")):
        for name, row in one_seed(given.out, teacher, seed, given.steps).items():
            rows[name].append(row)
            print(seed, name, row, flush=True)
    print("\n| student | steps | held-out loss | mean |\n| --- | --- | --- | --- |")
    for name, listed in rows.items():
        steps, losses, _ = zip(*listed, strict=True)
        each = ", ".join(f"{loss:.3f}" for loss in losses)
        print(f"| {name} | {', '.join(map(str, steps))} | {each} | {statistics.mean(losses):.3f} |")
    print(json.dumps({"teacher": known, "rows": rows}))


if __name__ == "__main__":
    main()
