"""Predicted beside measured step times of layouts of four ranks, on the machine at hand.

    python bench/planner_here.py [--models small moe-small] [--layouts 28] [--rounds 3]
                                 [--hardware here.json] [--hosts 2 --gbit 1] [--out result.json]

The machine is profiled, unless a hardware file is given. Layouts are dealt out of all that the rules accept,
in turn from each way to share four ranks among the axes, shuffled by a fixed seed. Every layout is trained
for some steps, in the same processes, round after round so that a machine whose speed drifts slows all alike.
A layout's time is the lower quartile of its steps, since other work on a machine only ever adds. Reported are
Spearman's and Kendall's rank correlation, and the regret: the measured time of the layout predicted fastest
over the best.

`--hosts 2` makes two network namespaces, each with half of the ranks and half of the cores, joined by a link
of `--gbit` Gb/s (veth and a token bucket filter). That takes root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import step_time
from meshwright.planner.memory.exact import memory_model
from meshwright.spec import RunSpec
from meshwright.spec.errors import UserError
from namespaces import Hosts, here, two_hosts
from small_layouts import layouts

BENCH = Path(__file__).resolve()
Times = list[list[float]]
"""Seconds of every step of each layout."""


def spec_of(model: str, layout: dict[str, Any], options: argparse.Namespace) -> RunSpec | None:
    """The run with that layout; None where the rules refuse it."""
    tree = {
        "model": {"preset": model},
        "data": {"corpus": "synthetic", "seq_len": options.seq_len, "document_mask": False},
        "train": {"batch_tokens": options.sequences * options.seq_len, "steps": 10**6},
        "layout": layout,
        "precision": {"compute": options.precision},
    }
    try:
        return RunSpec.model_validate(tree)
    except UserError:
        return None


def chosen(model: str, options: argparse.Namespace) -> list[RunSpec]:
    """As many layouts as asked for, dealt out evenly over the ways to share the ranks."""
    dealt = layouts(model.startswith("moe"), lambda layout: spec_of(model, layout, options))
    return list(islice(dealt, options.layouts))


# One rank -----------------------------------------------------------------------------------------------


def work(jobs: Path, out: Path) -> None:
    """Train every layout of the jobs for some steps, round after round, as one rank of the world."""
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
    times: Times = [[] for _ in specs]
    with process_group(place):
        groups = Groups("cpu")
        for turn in range(given["rounds"]):
            for index, spec in enumerate(specs):
                times[index] += steps_of(spec, groups, given["steps"])
                gc.collect()
                if place.rank == 0:
                    print(f"round {turn + 1}: {_said(spec)}: {times[index][-1]}", flush=True)
                    out.write_text(json.dumps(times), encoding="utf-8")


def steps_of(spec: RunSpec, groups: Any, steps: int) -> list[float]:
    """Some steps after a first one."""
    import torch

    from meshwright.comm.mesh import build_mesh
    from meshwright.data.corpus import open_corpus
    from meshwright.data.loader import Loader
    from meshwright.train.step import Trainer

    heads, experts = spec.model.kv_heads, spec.model.moe is not None
    mesh = build_mesh(spec.layout, torch.device("cpu"), heads, groups, experts)
    assert mesh is not None
    trainer, ranks = Trainer(spec, mesh), mesh.control
    trainer.initialise()
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
    batches = [loader.step(number) for number in range(steps + 1)]
    loader.close()
    found = []
    for number, batch in enumerate(batches, start=1):
        ranks.any(False)  # all ranks are here
        start = time.perf_counter()
        trainer.step(batch, number)
        ranks.any(False)
        found.append(round(time.perf_counter() - start, 4))
    return found[1:]


# All of them --------------------------------------------------------------------------------------------


def measure(specs: list[RunSpec], hosts: Hosts, options: argparse.Namespace) -> Times:
    """Every step of each layout."""
    with TemporaryDirectory() as folder:
        jobs, out = Path(folder) / "jobs.json", Path(folder) / "times.json"
        given = {
            "specs": [spec.to_json() for spec in specs],
            "rounds": options.rounds,
            "steps": options.steps,
        }
        jobs.write_text(json.dumps(given), encoding="utf-8")
        hosts.torchrun([str(BENCH), "--worker", str(jobs), str(out)])
        found: Times = json.loads(out.read_text(encoding="utf-8"))
    return found


def profiled(hosts: Hosts, options: argparse.Namespace) -> Cluster:
    """The machine, from its hardware file or measured now."""
    if options.hardware:
        return cluster(options.hardware)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "hardware.json"
        hosts.torchrun(["-m", "meshwright", "profile", "--seconds", str(options.seconds), "--out", str(file)])
        if options.keep_hardware:
            Path(options.keep_hardware).write_bytes(file.read_bytes())
        return cluster(str(file))


def compare(specs: list[RunSpec], times: Times, found: Cluster) -> dict[str, Any]:
    """The table of layouts by predicted time, the correlations and the regret."""
    on = CostModel(found)
    rows = []
    for spec, each in zip(specs, times, strict=True):
        timed = step_time(spec, on)
        rows.append(
            {
                "layout": _said(spec),
                "predicted": timed.seconds,
                "memory": memory_model(on).peak(spec).device,
                "measured": typical(each),
                "steps": each,
                "parts": {name: round(value, 4) for name, value in timed.parts.items() if value > 5e-5},
            }
        )
    # As plans are: of equal ones that with the least memory comes first.
    rows.sort(key=lambda row: (round(1e9 * math.log(row["predicted"])), row["memory"]))
    predicted, measured = ([row[key] for row in rows] for key in ("predicted", "measured"))
    return {
        "layouts": len(rows),
        "spearman": spearman(predicted, measured),
        "kendall": kendall(predicted, measured),
        "regret": measured[0] / min(measured) - 1,
        "error": statistics.median(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)),
        "rows": rows,
    }


def typical(steps: list[float]) -> float:
    """The lower quartile: whatever else a machine does only ever adds to a time."""
    return sorted(steps)[(len(steps) - 1) // 4]


def spearman(x: list[float], y: list[float]) -> float:
    """Correlation of ranks; equal values share theirs."""
    return statistics.correlation(_ranks(x), _ranks(y))


def _ranks(values: list[float]) -> list[float]:
    return [sum(other < value for other in values) + values.count(value) / 2 for value in values]


def kendall(x: list[float], y: list[float]) -> float:
    """Pairs in the same order less those in the other, over all pairs (tau-a)."""
    count = len(x)
    pairs = [(i, j) for i in range(count) for j in range(i)]
    signs = [(x[i] - x[j]) * (y[i] - y[j]) for i, j in pairs]
    return (sum(each > 0 for each in signs) - sum(each < 0 for each in signs)) / len(pairs)


def _said(spec: RunSpec) -> str:
    layout = spec.layout
    words = [layout.describe()]
    if layout.cp > 1:
        words.append(layout.context_mode)
    if layout.tp > 1 and not layout.sequence_parallel:
        words.append("no sequence shards")
    if layout.micro_batch is not None:
        words.append(f"micro_batch={layout.micro_batch}")
    return ", ".join(words)


def show(model: str, result: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"{model}: {result['layouts']} layouts, Spearman {result['spearman']:.2f}, "
        f"Kendall {result['kendall']:.2f}, regret {result['regret']:.1%}, "
        f"median error {result['error']:.0%}"
    )
    for row in result["rows"]:
        span = f"{min(row['steps']):.2f}-{max(row['steps']):.2f}"
        print(f"  {row['predicted']:8.3f} {row['measured']:8.3f}  {span:>12}  {row['layout']}")


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["small", "moe-small"])
    parser.add_argument("--layouts", type=int, default=28, help="layouts of each model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a layout in a round")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--hardware", help="hardware file of this machine with as many ranks and hosts")
    parser.add_argument("--keep-hardware", help="where the profile that is taken is written to")
    parser.add_argument("--seconds", type=float, default=90.0, help="of a profile")
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1)
    parser.add_argument("--gbit", type=float, default=1.0, help="Gb/s between hosts")
    parser.add_argument("--measured", help="result of an earlier run, whose layouts are predicted anew")
    parser.add_argument("--out", help="file for the result, as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    options = options_of(sys.argv[1:])
    results: dict[str, Any] = {}
    if options.measured:
        before = json.loads(Path(options.measured).read_text(encoding="utf-8"))
        for model, result in before.items():
            specs = {_said(spec): spec for spec in chosen(model, options)}
            known = [row for row in result["rows"] if row["layout"] in specs]
            listed = [specs[row["layout"]] for row in known]
            show(model, compare(listed, [row["steps"] for row in known], cluster(options.hardware)))
        return
    with two_hosts(options.gbit) if options.hosts == 2 else here() as hosts:
        found = profiled(hosts, options)
        for model in options.models:
            specs = chosen(model, options)
            results[model] = compare(specs, measure(specs, hosts, options), found)
            show(model, results[model])
            if options.out:
                Path(options.out).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
