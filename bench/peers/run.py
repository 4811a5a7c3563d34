"""Meshwright's `train` beside other programs: the same model on the same tokens, in turns of a few steps.

    python bench/peers/run.py [--models small base moe-small] [--precision bf16 fp32] [--sides NAME ...]
                              [--cases one-thread one replicate zero3 tp2 pp2] [--rounds 2] [--stretches 3]
                              [--steps 3] [--out FILE.jsonl] [--page docs/peers.md]

Both sides are started as their users do, and train on 8 sequences of 512 random tokens a step with AdamW and
clipping. In a round Meshwright starts once; each other side starts, and then both take turns: one goes on for
a stretch of some steps while all processes of the other are stopped (SIGSTOP), since a machine's speed may
drift within a minute by more than what is compared. Meshwright's side is `meshwright train` with all its
defaults, but for the document mask, which others do not have. Each peer lives in a venv of its own
(`.peers/`, made on the first call from `requirements/`), and says what each of its ranks really holds.

Cases: `one-thread` is one process on one core, `one` one process on all cores, the others two processes that
share the cores: replicate, zero3, tp2, pp2. One JSON object a line, for each side:

    {"model", "precision", "case", "side", "machine", "tokens_per_second", "quartiles", "ratio", "ratios",
     "matmul_fraction", "matmul_gflops", "peak_bytes", "first_step_seconds", "losses", "held", "note",
     "error"}

The first steps do not count: compilers work in them, and Meshwright tries in five what a snapshot in memory
costs. Nor do those in which a side was stopped. `tokens_per_second` is from the median of all steps that
count, `ratio` ours over theirs, the median of those of pairs of stretches; `matmul_fraction` the model's
FLOP/s over the rate of matrix products, measured before the stretches of each side by as many processes and
threads; `peak_bytes` the most that all processes of a side had in memory at once (PSS, read twice a second,
but not in stretches, which reads would slow down by a tenth); `first_step_seconds` from the command to the
end of the first step; `losses` of the first step and of a peer's last. Where a side cannot run, `error` is
the last line that it wrote. `--page` writes all lines of `--out` as a page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy

from cases import CASES, MODELS, SEQ_LEN, SEQUENCES, Case
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.host import cpu_info
from meshwright.profile.machine import processor
from meshwright.spec import load
from page import case_of, page, processor_of
from program import Program, Report
from sides import SIDES, Side

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WARM, PEER_WARM = 7, 3
"""First steps that do not count: of ours, and of a peer."""
SKIPPED = 2
"""Steps at the start of a stretch that do not count: in the first of them the side was stopped, and in the
second one too if the line of a step came late."""
OURS = "Meshwright"


@dataclass(frozen=True)
class Plan:
    """How often all sides start, how often two of them change, and after how many steps that count."""

    rounds: int
    stretches: int
    steps: int

    @property
    def peer_steps(self) -> int:
        """Steps of a peer in a round."""
        return PEER_WARM + self.stretches * (SKIPPED + self.steps)

    def our_steps(self, peers: int) -> int:
        """Our steps in a round beside so many peers."""
        return WARM + max(1, peers) * self.stretches * (SKIPPED + self.steps)


@dataclass(frozen=True)
class Stretch:
    """The figures of steps that count: those at these places of a report."""

    report: Report
    places: range

    @property
    def seconds(self) -> list[float]:
        return [self.report.seconds[place] for place in self.places]


@dataclass(frozen=True)
class Round:
    """A side's report in a round, its stretches, ours beside each, and the FLOP/s of matrix products then."""

    report: Report
    stretches: list[Stretch]
    ours: list[Stretch]
    rate: float


# Sides --------------------------------------------------------------------------------------------------


def python_of(side: Side) -> Path:
    """The interpreter of a side's venv, which is made where it is missing."""
    home = ROOT / ".peers" / side.venv
    python, done = home / "bin" / "python", home / "installed"
    if not done.exists():
        print(f"installing {side.venv} into {home}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for file in (f"{side.venv}.txt", f"{side.venv}.no-deps.txt"):
            listed = HERE / "requirements" / file
            if listed.exists():
                extra = ["--no-deps"] if "no-deps" in file else ["-c", str(ROOT / "constraints.txt")]
                subprocess.run([*install, *extra, "-r", str(listed)], check=True)
        done.touch()
    return python


def our_program(case: Case, steps: int, folder: Path) -> Program:
    """`meshwright train`; its figures are in its folder when it has ended, see `read_ours`."""
    words = case.words(steps)
    command = [sys.executable, "-m", "meshwright", "train", *words, "--out", str(folder / "run")]

    def read(line: str, report: Report) -> None:
        row = json.loads(line)
        if "loss" in row:
            report.steps = row["step"]

    # The output has a line in two seconds, which may be less than one a step.
    return Program(command, case.cores, os.environ, folder, read, folder / "run" / "metrics.jsonl")


def read_ours(report: Report, folder: Path) -> None:
    """Enter the figures of a run in its folder."""
    if report.error is not None:
        raise SystemExit(f"meshwright train has failed: {report.error}")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open(encoding="utf-8")]
    rows = [row for row in rows if "loss" in row]
    report.seconds, report.losses = [row["seconds"] for row in rows], [row["loss"] for row in rows]
    report.held = [json.loads((folder / "run" / "result.json").read_text(encoding="utf-8"))["memory"]]


def their_program(side: Side, case: Case, steps: int, tokens: Path, folder: Path) -> Program:
    """A peer's program."""
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, len(case.cores) // case.processes))}
    if not side.venv:
        part = {"layout.dp": 1, "train.batch_tokens": SEQ_LEN * SEQUENCES // case.processes}
        words = case.words(steps + WARM, part)  # no run ends before the steps that count have
        command = [sys.executable, str(HERE / side.program), str(case.processes), str(folder), *words]
        return Program(command, case.cores, environment, folder, read_step)
    model = case.spec(steps).model
    moe = None if model.moe is None else model.moe.model_dump(mode="json")
    given = {
        **model.model_dump(include={"layers", "hidden", "ffn", "heads", "kv_heads", "vocab_size"}),
        "moe": moe, "seq_len": SEQ_LEN, "tokens": str(tokens), "steps": steps, "precision": case.precision,
        "layout": "one" if case.processes == 1 else case.name, "variant": side.variant,
        "micro_batch": case.layout["layout.micro_batch"],
    }  # fmt: skip
    file = folder / "job.json"
    file.write_text(json.dumps(given), encoding="utf-8")
    command = [str(python_of(side)), "-W", "ignore"]
    if case.processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        command += [*launcher, "--nproc-per-node", str(case.processes)]
    environment |= {"PYTHONPATH": str(HERE), "TOKENIZERS_PARALLELISM": "false"}
    command += [str(HERE / side.program), str(file)]
    return Program(command, case.cores, environment, folder, read_step)


def read_step(line: str, report: Report) -> None:
    """Enter a line that a peer wrote."""
    if not line.startswith("{"):
        return
    row = json.loads(line)
    if "seconds" in row:
        report.steps += 1
        report.seconds.append(row["seconds"])
        report.losses.append(row["loss"])
    else:
        report.held, report.note = row["held"], row["note"]


def machine() -> str:
    """The processor, its instructions and cores, torch's version and today's date."""
    cores = len(os.sched_getaffinity(0))
    name = f"{processor()} {instructions(cpu_info('flags'))}".rstrip()
    return f"{name}, {cores} cores; torch {version('torch')}; {datetime.date.today()}"


def instructions(flags: str) -> str:
    """The best of the instructions that decide an x86's rate of products, in parentheses; "" for others.

    Processors that differ in them may share a name, as those of virtual machines do.
    """
    known = {
        "amx_bf16": "AMX",
        "avx512_bf16": "AVX-512 with bf16",
        "avx512f": "AVX-512",
        "avx2": "AVX2",
    }
    return next((f"({name})" for flag, name in known.items() if flag in flags.split()), "")


def matmul_rate(case: Case) -> float:
    """FLOP/s of matrix products, of all processes of a case at once."""
    program = (
        "import sys, torch; from meshwright.parallel.precision import DTYPES, use_fast_fp32_matmul;"
        "from meshwright.kernels.half_precision_products import products_in_fp32;"
        "from meshwright.train.matmul_peak import matmul_flops_per_second as rate;"
        "cpu = torch.device('cpu'); torch.set_num_threads(int(sys.argv[2])); use_fast_fp32_matmul(cpu);"
        "dtype = DTYPES[sys.argv[1]]\n"
        "with products_in_fp32(cpu, dtype): print(rate(dtype, cpu, 2.0))"
    )
    threads = max(1, len(case.cores) // case.processes)
    command = [sys.executable, "-c", program, case.precision, str(threads)]
    started = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, case.cores)
        )
        for _ in range(case.processes)
    ]
    return sum(float(process.communicate()[0]) for process in started)


def tokens_of(case: Case, steps: int, file: Path) -> None:
    """Write the tokens of the run's steps, each with its targets."""
    spec = load(
        None,
        [
            (key, str(value))
            for key, value in (
                case.keys(steps)
                | {"layout.dp": 1, "layout.tp": 1, "layout.pp": 1, "layout.zero": 0, "layout.micro_batch": 8}
            ).items()
        ],
    )
    loader = Loader(open_corpus(spec), spec, 0, 1)
    batches = [loader.step(number) for number in range(steps)]
    loader.close()
    whole = [
        numpy.concatenate([batch.tokens.numpy(), batch.targets.numpy()[:, -1:]], axis=1) for batch in batches
    ]
    numpy.save(file, numpy.stack(whole).astype(numpy.int64))


# The comparison -----------------------------------------------------------------------------------------


def compare(case: Case, sides: Sequence[Side], plan: Plan) -> Iterator[dict[str, Any]]:
    """A row for each side."""
    rounds: dict[str, list[Round]] = {OURS: [], **{side.name: [] for side in sides}}
    with TemporaryDirectory() as name:
        tokens = Path(name) / "tokens.npy"
        tokens_of(case, plan.peer_steps, tokens)
        for _ in range(plan.rounds):
            left = [side for side in sides if not any(each.report.error for each in rounds[side.name])]
            for side_name, found in one_round(case, left, plan, tokens).items():
                rounds[side_name].append(found)
    flops = case.spec(1).model.flops_per_token(SEQ_LEN)
    for side_name, listed in rounds.items():
        yield row_of(case, side_name, listed, plan, flops)


def one_round(case: Case, sides: Sequence[Side], plan: Plan, tokens: Path) -> dict[str, Round]:
    """Run each side beside ours, which goes on whenever theirs has stopped."""
    found: dict[str, Round] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        with our_program(case, plan.our_steps(len(sides)), folder) as ours:
            ready = ours.until(WARM)
            for side in sides if ready else []:
                found[side.name] = beside(ours, side, case, plan, tokens)
            if ready and not sides:
                alone = [stretch(ours, plan) for _ in range(plan.stretches)]
                found[OURS] = Round(ours.report, alone, alone, matmul_rate(case))
            ours.end()
        read_ours(ours.report, folder)
    if sides:
        every = [each for turn in found.values() for each in turn.ours]
        rate = statistics.median([turn.rate for turn in found.values() if turn.ours] or [matmul_rate(case)])
        found[OURS] = Round(ours.report, every, every, rate)
    return found


def beside(ours: Program, side: Side, case: Case, plan: Plan, tokens: Path) -> Round:
    """Run a side, in turns with ours."""
    mine: list[Stretch] = []
    their: list[Stretch] = []
    rate = 0.0
    with (
        TemporaryDirectory() as name,
        their_program(side, case, plan.peer_steps, tokens, Path(name)) as theirs,
    ):
        if theirs.until(PEER_WARM):
            rate = matmul_rate(case)
            for _ in range(plan.stretches):
                their.append(stretch(theirs, plan))
                mine.append(stretch(ours, plan))
        theirs.end()
    return Round(theirs.report, their, mine, rate)


def stretch(program: Program, plan: Plan) -> Stretch:
    """Let a program that has stopped end the steps that it was in, and take some more, which count."""
    start = program.report.steps + SKIPPED
    program.until(start + plan.steps, timed=True)
    return Stretch(program.report, range(start, start + plan.steps))


def row_of(case: Case, side: str, rounds: Sequence[Round], plan: Plan, flops: float) -> dict[str, Any]:
    """The row of a side."""
    row: dict[str, Any] = {"model": case.model, "precision": case.precision, "case": case.name, "side": side}
    row["machine"] = machine()
    reports = [each.report for each in rounds]
    failed = next((report.error for report in reports if report.error), None)
    if failed is not None:
        return row | {"error": failed}
    steps = [second for each in rounds for own in each.stretches for second in own.seconds]
    low, middle, high = (SEQ_LEN * SEQUENCES / value for value in reversed(statistics.quantiles(steps, n=4)))
    ratios = [
        statistics.median(own.seconds) / statistics.median(ours.seconds)
        for each in rounds
        for own, ours in zip(each.stretches, each.ours, strict=True)
    ]
    of_peak = [
        SEQ_LEN * SEQUENCES * flops / statistics.median(own.seconds) / each.rate
        for each in rounds
        for own in each.stretches
    ]
    return row | {
        "tokens_per_second": round(middle, 1),
        "quartiles": [round(low, 1), round(high, 1)],
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
        "matmul_fraction": round(statistics.median(of_peak), 3),
        "matmul_gflops": round(statistics.median(each.rate for each in rounds) / 1e9, 1),
        "peak_bytes": statistics.median_low([report.peak for report in reports]),
        "first_step_seconds": round(statistics.median([report.first for report in reports]), 2),
        "losses": [round(reports[-1].losses[place], 4) for place in (0, plan.peer_steps - 1)],
        "held": reports[-1].held,
        "note": reports[-1].note,
    }


def record(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Put rows at the end of a file of rows, in place of those that it has of the same case, processor and
    side."""
    of_sides = [(case_of(row), processor_of(row), row["side"]) for row in rows]
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    before = [json.loads(line) for line in lines]
    kept = [row for row in before if (case_of(row), processor_of(row), row["side"]) not in of_sides]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *rows]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["small"], choices=MODELS)
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp32"], choices=["bf16", "fp32"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--sides", nargs="+", help="parts of names, capitals as there; default all")
    parser.add_argument("--rounds", type=int, default=2, help="how often all sides are started")
    parser.add_argument("--stretches", type=int, default=3, help="how often ours and another take turns then")
    parser.add_argument("--steps", type=int, default=3, help="steps of a stretch that count")
    parser.add_argument("--out", type=Path, default=Path("peers.jsonl"))
    parser.add_argument("--page", type=Path, help="write a page of all rows of --out")
    options = parser.parse_args()
    if options.rounds < 1 or options.stretches < 1 or options.steps < 2:
        parser.error("--rounds, --stretches, --steps: give at least 1, 1 and 2")
    for part in options.sides or []:
        if not any(part in side.name for side in SIDES):
            known = ", ".join(side.name for side in SIDES)
            parser.error(f"--sides: {part!r} is in no name of a side; give parts of these: {known}")
    for number in (signal.SIGTERM, signal.SIGHUP):  # else sides that are stopped would stay for ever
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    plan = Plan(options.rounds, options.stretches, options.steps)
    for model in options.models:
        for precision in options.precision:
            for name in options.cases:
                case = Case(model, precision, name)
                layout = "one" if case.processes == 1 else name
                sides = [
                    side for side in SIDES
                    if layout in side.cases and precision in side.precisions and model in side.models
                    and (not options.sides or any(part in side.name for part in options.sides))
                ]  # fmt: skip
                if options.sides and not sides:
                    continue
                rows = list(compare(case, sides, plan))
                record(options.out, rows)
                for row in rows:
                    print(json.dumps({key: value for key, value in row.items() if key != "held"}), flush=True)
    if options.page:
        rows = [json.loads(line) for line in options.out.open(encoding="utf-8")]
        options.page.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
