"""Islands beside synchronous training over a slow link: a step's seconds, planned and measured, and losses.

    sudo python bench/islands.py [--mbit 100] [--every 10 20 50] [--delay 2] [--rounds 3] [--steps 8]
                                 [--hardware two.json] [--seconds 60] [--train 0] [--out result.jsonl]

Two network namespaces with half of the cores and one rank each, joined by a link of `--mbit` Mb/s (veth and a
token bucket filter), are profiled as `meshwright profile` does, unless a hardware file of two such hosts is
given. The run is `--run` (examples/first.toml), with one replica a host: islands that do not exchange at all
(`alone`), synchronous, and islands with each period, without a delay and with `--delay` steps of it. All are
trained in the same processes, round after round; a round of islands is a whole period from one exchange to
the next, and of the others `--steps` steps. The median round counts.

With `--train N` each is also trained for N steps by `meshwright train`, from the same initial weights on the
same tokens, and its loss on held-out documents is set beside that of synchronous training. One JSON object a
line:

    {"case", "step_seconds", "planned_seconds", "error", "error_beside_alone", "tokens_per_second", "ratio",
     "rounds"} and {"case", "steps", "tokens", "val_loss", "loss_ratio", "seconds"}

`error` is planned over measured, less 1, and `error_beside_alone` that with the measured seconds of `alone`
in place of the planned ones, which other work on the machine makes longer; `ratio` is tokens per second over
those of synchronous training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import step_time
from meshwright.spec import RunSpec, load
from namespaces import Hosts, two_hosts

BENCH = Path(__file__).resolve()
FIRST = BENCH.parents[1] / "examples" / "first.toml"
HOSTS = 2
Case = tuple[str, list[tuple[str, str]]]
"""A name, and dotted keys with their texts."""


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Synchronous training, and islands with each period, without a delay and with one."""
    yield "synchronous", [("layout.dp", str(HOSTS))]
    for every in options.every:
        for delay in [0] + [options.delay] * (0 < options.delay < every):
            keys = {"layout.dp": 1, "layout.replicate": HOSTS, "outer.every": every, "outer.delay": delay}
            keys |= {"outer.fragments": options.fragments} if delay else {}
            name = f"every {every}" + (f", delay {delay}" if delay else "")
            yield name, [(key, str(value)) for key, value in keys.items()]


ALONE: Case = "alone", [("layout.dp", "1"), ("layout.replicate", str(HOSTS)), ("outer.every", str(10**6))]


def spec_of(case: Case, options: argparse.Namespace, **keys: object) -> RunSpec:
    """The run of a case, with other keys."""
    given = [*case[1], *options.keys, *((key.replace("__", "."), str(value)) for key, value in keys.items())]
    return load(Path(options.run), given)


# One rank -----------------------------------------------------------------------------------------------


def work(jobs: Path, out: Path) -> None:
    """Train every run of the jobs, round after round, as one rank of the world."""
    import torch

    from meshwright.comm.process_groups import Groups
    from meshwright.parallel.precision import use_fast_fp32_matmul
    from meshwright.rank.env import keep_freed_memory, limit_threads, worker
    from meshwright.rank.process_group import process_group

    given = json.loads(jobs.read_text(encoding="utf-8"))
    place = worker()
    assert place is not None
    limit_threads(place.local_world_size)
    keep_freed_memory()
    use_fast_fp32_matmul(torch.device("cpu"))
    specs = [RunSpec.model_validate(tree) for tree in given["specs"]]
    rounds: list[list[float]] = [[] for _ in specs]
    with process_group(place):
        groups = Groups("cpu")
        for _ in range(given["rounds"]):
            for index, spec in enumerate(specs):
                rounds[index].append(round_of(spec, groups, given["steps"][index]))
                if place.rank == 0:
                    out.write_text(json.dumps(rounds), encoding="utf-8")


def round_of(spec: RunSpec, groups: Any, steps: int) -> float:
    """Mean seconds of `steps` steps, after two others, the last of which begins an exchange of islands."""
    import torch

    from meshwright.comm.mesh import build_mesh
    from meshwright.data.corpus import open_corpus
    from meshwright.data.loader import Loader
    from meshwright.train.step import Trainer

    heads, cpu = spec.model.kv_heads, torch.device("cpu")
    mesh = build_mesh(spec.layout, cpu, heads, groups, False, spec.step_groups > 1)
    assert mesh is not None
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
    batches = [loader.step(number) for number in range(4)]
    loader.close()
    trainer.expect(batches[0])
    mesh.control.any(False)  # all ranks are here
    start = 0.0
    for place, number in enumerate(range(steps - 1, 2 * steps + 1)):
        if place == 2:
            start = time.perf_counter()
        trainer.step(batches[place % 4], number, following=batches[(place + 1) % 4])
    return (time.perf_counter() - start) / steps


# All of them --------------------------------------------------------------------------------------------


def measure(specs: list[RunSpec], hosts: Hosts, options: argparse.Namespace) -> list[list[float]]:
    """Seconds of a step of each run, of every round."""
    with TemporaryDirectory() as folder:
        jobs, out = Path(folder) / "jobs.json", Path(folder) / "rounds.json"
        trees = [spec.to_json() for spec in specs]
        steps = [each.outer.every if 0 < each.outer.every < 10**6 else options.steps for each in specs]
        given = {"specs": trees, "rounds": options.rounds, "steps": steps}
        jobs.write_text(json.dumps(given), encoding="utf-8")
        hosts.torchrun([str(BENCH), "--worker", str(jobs), str(out)], HOSTS)
        found: list[list[float]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def profiled(hosts: Hosts, options: argparse.Namespace) -> Cluster:
    """The two hosts, from a hardware file or measured now."""
    if options.hardware:
        return cluster(options.hardware)
    with TemporaryDirectory() as folder:
        file = Path(options.keep_hardware or Path(folder) / "hardware.json")
        arguments = ["-m", "meshwright", "profile", "--seconds", str(options.seconds), "--out", str(file)]
        hosts.torchrun(arguments, HOSTS)
        return cluster(str(file))


def compared(
    listed: list[Case], specs: list[RunSpec], rounds: list[list[float]], on: CostModel
) -> Iterator[dict[str, Any]]:
    """A row for each case, of which the first is `alone` and the second synchronous."""
    seconds, plans = [statistics.median(each) for each in rounds], [step_time(spec, on) for spec in specs]
    alone, planned_alone = seconds[0], plans[0].alone
    for (name, _), spec, step, each, plan in zip(listed, specs, seconds, rounds, plans, strict=True):
        beside = plan.alone - planned_alone + alone
        beside += plan.model.stages.exchange(spec, beside).total
        yield {
            "case": name,
            "step_seconds": round(step, 4),
            "planned_seconds": round(plan.seconds, 4),
            "error": round(plan.seconds / step - 1, 3),
            "error_beside_alone": round(beside / step - 1, 3),
            "tokens_per_second": round(spec.train.batch_tokens / step),
            "ratio": round(seconds[1] / step, 2),
            "rounds": [round(value, 4) for value in each],
        }


def trained(listed: list[Case], hosts: Hosts, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Losses of whole runs, and how long these take."""
    first = None
    for case in listed:
        spec = spec_of(case, options, train__steps=options.train)
        keys = [word for key, text in [*case[1], *options.keys] for word in (f"--{key}", text)]
        with TemporaryDirectory() as folder:
            out, start = Path(folder) / "run", time.perf_counter()
            words = ["train", str(options.run), *keys, "--train.steps", str(options.train), "--out", str(out)]
            hosts.torchrun(["-m", "meshwright", *words], HOSTS)
            taken = time.perf_counter() - start
            rows = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
            loss = [row["val_loss"] for row in rows if "val_loss" in row][-1]
        first = first or loss
        yield {
            "case": case[0],
            "steps": options.train,
            "tokens": options.train * spec.train.batch_tokens,
            "val_loss": round(loss, 4),
            "loss_ratio": round(loss / first, 4),
            "seconds": round(taken, 1),
        }


def pair(text: str) -> tuple[str, str]:
    """A dotted key and its text."""
    key, _, value = text.partition("=")
    return key, value


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", default=str(FIRST), help="run file")
    parser.add_argument(
        "--keys", nargs="*", type=pair, default=[], help="further keys: train.batch_tokens=4096"
    )
    parser.add_argument("--mbit", type=float, default=100.0, help="Mb/s between the hosts")
    parser.add_argument("--every", type=int, nargs="*", default=[10, 20, 50], help="periods")
    parser.add_argument("--delay", type=int, default=2, help="steps of the delay; 0 for none")
    parser.add_argument("--fragments", type=int, default=1, help="with a delay")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a round of synchronous training")
    parser.add_argument("--hardware", help="hardware file of two such hosts of one rank")
    parser.add_argument("--keep-hardware", help="where the profile that is taken is written to")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a profile")
    parser.add_argument(
        "--train", type=int, default=0, help="steps of whole runs, for their losses; 0 for none"
    )
    parser.add_argument("--out", help="file for the rows, as JSON lines")
    return parser.parse_args(arguments)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    options = options_of(sys.argv[1:])
    listed = list(cases(options))
    timed = [ALONE, *listed]
    specs = [spec_of(case, options) for case in timed]
    rows: list[str] = []

    def tell(row: dict[str, Any]) -> None:
        rows.append(json.dumps(row))
        print(rows[-1], flush=True)
        if options.out:
            Path(options.out).write_text("\n".join(rows) + "\n", encoding="utf-8")

    with two_hosts(options.mbit / 1000) as hosts:
        if options.rounds:
            on = CostModel(profiled(hosts, options))
            for row in compared(timed, specs, measure(specs, hosts, options), on):
                tell(row)
        for row in trained(listed, hosts, options) if options.train else ():
            tell(row)


if __name__ == "__main__":
    main()
