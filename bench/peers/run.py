"""Meshwright's `train` beside other programs: the same model on the same tokens, in turns.

    python bench/peers/run.py [--models small base moe-small] [--precision bf16 fp32] [--sides NAME ...]
                              [--cases one-thread one replicate zero3 tp2 pp2] [--rounds 3] [--steps 14]
                              [--out FILE.jsonl] [--page docs/peers.md]

A turn starts a side as its users do, trains `--steps` steps of 8 sequences of 512 random tokens with AdamW
and clipping, and ends it; sides take turns round after round, since a machine's speed drifts by more than
what is compared. Meshwright's side is `meshwright train` with all its defaults, but for the document mask,
which others do not have. Each peer lives in a venv of its own (`.peers/`, made on the first call from
`requirements/`), and says what each of its ranks really holds.

Cases: `one-thread` is one process on one core, `one` one process on all cores, the others two processes that
share the cores: replicate, zero3, tp2, pp2. One JSON object a line, for each side:

    {"model", "precision", "case", "side", "machine", "tokens_per_second", "quartiles", "ratio", "ratios",
     "matmul_fraction", "matmul_gflops", "peak_bytes", "first_step_seconds", "losses", "held", "note",
     "error"}

The first steps do not count: compilers work in them, and Meshwright tries in five what a snapshot in memory
costs. `tokens_per_second` is from the median of all steps but the first seven of each turn, `ratio` ours
over theirs, by rounds; `matmul_fraction` the model's FLOP/s over the rate of matrix products, measured in
each round by as many processes and threads; `peak_bytes` the most that all processes of a side had in
memory at once (PSS, read twice a second, but not while steps are timed, which reads would slow down by a
tenth); `first_step_seconds` from the command to the end of the first
step. Where a side cannot run, `error` is the last line that it wrote. `--page` writes all lines of `--out`
as a page.
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
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy

from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.profile.machine import processor
from meshwright.spec import RunSpec, load
from page import case_of, page, processor_of
from sides import SIDES, Side

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SEQ_LEN, SEQUENCES, WARM = 512, 8, 7
CASES = {"one-thread": 1, "one": 1, "replicate": 2, "zero3": 2, "tp2": 2, "pp2": 2}
"""Processes of each case."""
LAYOUTS: dict[str, dict[str, int]] = {
    "one-thread": {"layout.micro_batch": 8},
    "one": {"layout.micro_batch": 8},
    "replicate": {"layout.dp": 2, "layout.zero": 0, "layout.micro_batch": 4},
    "zero3": {"layout.dp": 2, "layout.zero": 3, "layout.micro_batch": 4},
    "tp2": {"layout.tp": 2, "layout.micro_batch": 8},
    "pp2": {"layout.pp": 2, "layout.micro_batch": 2},
}
OURS = "Meshwright"
LIMIT = 600.0
"""Seconds that a turn may take."""


@dataclass(frozen=True)
class Case:
    """A model in a precision and a layout."""

    model: str
    precision: str
    name: str

    @property
    def processes(self) -> int:
        return CASES[self.name]

    @property
    def cores(self) -> list[int]:
        """The cores that the case has."""
        cores = sorted(os.sched_getaffinity(0))
        return cores[:1] if self.name == "one-thread" else cores

    def keys(self, steps: int) -> dict[str, object]:
        """The run's keys."""
        return {
            "model.preset": self.model,
            "data.corpus": "synthetic",
            "data.seq_len": SEQ_LEN,
            "data.document_mask": "false",
            "train.batch_tokens": SEQ_LEN * SEQUENCES,
            "train.steps": steps,
            "train.log_every": 1,
            "precision.compute": self.precision,
            **LAYOUTS[self.name],
        }

    def spec(self, steps: int) -> RunSpec:
        return load(None, [(key, str(value)) for key, value in self.keys(steps).items()])


@dataclass
class Turn:
    """The figures of one side in one turn."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    first: float = 0.0
    held: list[Any] = field(default_factory=list)
    note: str = ""
    error: str | None = None
    timed: bool = False
    """True while the steps run that count: to read a process's memory stops it for tens of milliseconds."""

    def note_step(self, number: int, steps: int) -> None:
        """Step `number` of `steps` has ended; the lines of one or two more may come late."""
        self.timed = WARM - 2 <= number < steps


# Processes and their memory -----------------------------------------------------------------------------


def descendants(pid: int) -> Iterator[int]:
    """A process and all that came from it."""
    yield pid
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in text.split():
        yield from descendants(int(child))


def memory(pid: int) -> int:
    """Bytes in memory of a process and its descendants; what they share is counted once (PSS)."""
    total = 0
    for each in descendants(pid):
        try:
            text = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="ascii")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile
        total += sum(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total


def finished(
    command: Sequence[str], cores: Sequence[int], threads: int, folder: Path, turn: Turn
) -> Iterator[str]:
    """Run a command, yield its lines as they come, and note its peak in memory and its error in the turn."""
    environment = dict(os.environ)
    if command[1:3] != ["-m", "meshwright"]:  # whose ranks share the cores by themselves
        environment |= {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(HERE),
            "TOKENIZERS_PARALLELISM": "false",
        }
    errors = folder / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, cwd=folder,
            start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.5):
                if not turn.timed:
                    turn.peak = max(turn.peak, memory(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        limit = threading.Timer(LIMIT, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        try:
            assert process.stdout is not None
            yield from process.stdout
            if process.wait() and limit.finished.is_set():
                turn.error = f"stopped after {LIMIT:g} s"
            elif process.returncode:
                lines = [line for line in errors.read_text().splitlines() if line.strip()]
                told = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
                turn.error = (told or lines or [f"status {process.returncode}"])[-1].strip()[:300]
        finally:
            limit.cancel()
            over.set()
            watcher.join()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


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


def our_turn(case: Case, steps: int) -> Turn:
    """Train with `meshwright train`."""
    turn, start = Turn(), time.perf_counter()
    with TemporaryDirectory() as name:
        folder = Path(name)
        words = [word for key, value in case.keys(steps).items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "meshwright", "train", *words, "--out", str(folder / "run")]
        for line in finished(command, case.cores, 0, folder, turn):
            if line.startswith("step "):
                turn.first = turn.first or time.perf_counter() - start
                turn.note_step(int(line.split()[1].split("/")[0]), steps)
        if turn.error is not None:
            raise SystemExit(f"meshwright train has failed: {turn.error}")
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open(encoding="utf-8")]
        rows = [row for row in rows if "loss" in row]
        turn.seconds, turn.losses = [row["seconds"] for row in rows], [row["loss"] for row in rows]
        turn.held = [json.loads((folder / "run" / "result.json").read_text(encoding="utf-8"))["memory"]]
    return turn


def their_turn(side: Side, case: Case, steps: int, tokens: Path) -> Turn:
    """Train with a peer's program."""
    model, turn = case.spec(steps).model, Turn()
    moe = None if model.moe is None else model.moe.model_dump(mode="json")
    given = {
        **model.model_dump(include={"layers", "hidden", "ffn", "heads", "kv_heads", "vocab_size"}),
        "moe": moe, "seq_len": SEQ_LEN, "tokens": str(tokens), "steps": steps, "precision": case.precision,
        "layout": "one" if case.processes == 1 else case.name, "variant": side.variant,
        "micro_batch": LAYOUTS[case.name]["layout.micro_batch"],
    }  # fmt: skip
    python = python_of(side)
    with TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "job.json"
        file.write_text(json.dumps(given), encoding="utf-8")
        command = [str(python), "-W", "ignore"]
        if case.processes > 1:
            command += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(case.processes),
            ]
        start = time.perf_counter()
        threads = max(1, len(case.cores) // case.processes)
        for line in finished(
            [*command, str(HERE / side.program), str(file)], case.cores, threads, folder, turn
        ):
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            if "seconds" in row:
                turn.first = turn.first or time.perf_counter() - start
                turn.seconds.append(row["seconds"])
                turn.losses.append(row["loss"])
                turn.note_step(len(turn.seconds), steps)
            else:
                turn.held, turn.note = row["held"], row["note"]
    return turn


def machine() -> str:
    """The processor, its cores, torch's version and today's date."""
    cores = len(os.sched_getaffinity(0))
    return f"{processor()}, {cores} cores; torch {version('torch')}; {datetime.date.today()}"


def matmul_rate(case: Case) -> float:
    """FLOP/s of matrix products, of all processes of a case at once."""
    program = (
        "import sys, torch; from meshwright.parallel.precision import DTYPES, use_fast_fp32_matmul;"
        "from meshwright.parallel.half_precision_products import products_in_fp32;"
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


def compare(case: Case, sides: Sequence[Side], rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """A row for each side."""
    turns: dict[str, list[Turn]] = {OURS: [], **{side.name: [] for side in sides}}
    rates: list[float] = []
    with TemporaryDirectory() as name:
        tokens = Path(name) / "tokens.npy"
        tokens_of(case, steps, tokens)
        for _ in range(rounds):
            rates.append(matmul_rate(case))
            turns[OURS].append(our_turn(case, steps))
            for side in sides:
                if not (turns[side.name] and turns[side.name][-1].error):
                    turns[side.name].append(their_turn(side, case, steps, tokens))
    model = case.spec(steps).model
    for side_name, listed in turns.items():
        yield row_of(case, side_name, listed, turns[OURS], rates, model.flops_per_token(SEQ_LEN))


def row_of(
    case: Case, side: str, turns: Sequence[Turn], ours: Sequence[Turn], rates: Sequence[float], flops: float
) -> dict[str, Any]:
    """The row of a side."""
    row: dict[str, Any] = {"model": case.model, "precision": case.precision, "case": case.name, "side": side}
    row["machine"] = machine()
    failed = next((turn.error for turn in turns if turn.error), None)
    if failed is not None:
        return row | {"error": failed}
    steps = [second for turn in turns for second in turn.seconds[WARM:]]
    low, middle, high = (SEQ_LEN * SEQUENCES / value for value in reversed(statistics.quantiles(steps, n=4)))
    medians = [[statistics.median(turn.seconds[WARM:]) for turn in each] for each in (turns, ours)]
    ratios = [theirs / mine for theirs, mine in zip(*medians, strict=True)]
    of_peak = [
        SEQ_LEN * SEQUENCES * flops / second / rate for second, rate in zip(medians[0], rates, strict=True)
    ]
    return row | {
        "tokens_per_second": round(middle, 1),
        "quartiles": [round(low, 1), round(high, 1)],
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
        "matmul_fraction": round(statistics.median(of_peak), 3),
        "matmul_gflops": round(statistics.median(rates) / 1e9, 1),
        "peak_bytes": statistics.median_low([turn.peak for turn in turns]),
        "first_step_seconds": round(statistics.median([turn.first for turn in turns]), 2),
        "losses": [round(turns[-1].losses[place], 4) for place in (0, -1)],
        "held": turns[-1].held,
        "note": turns[-1].note,
    }


def record(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Put the rows of a case at the end of a file of rows, in place of those that it has of the case on the
    same processor."""
    of_case = [(case_of(row), processor_of(row)) for row in rows]
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    before = [json.loads(line) for line in lines]
    kept = [row for row in before if (case_of(row), processor_of(row)) not in of_case]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *rows]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["small"], choices=["small", "base", "moe-small"])
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp32"], choices=["bf16", "fp32"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--sides", nargs="+", help="names, or parts of them; default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=14, help=f"steps of a turn, the first {WARM} of which do not count"
    )
    parser.add_argument("--out", type=Path, default=Path("peers.jsonl"))
    parser.add_argument("--page", type=Path, help="write a page of all rows of --out")
    options = parser.parse_args()
    if options.steps < WARM + 2:
        parser.error(
            f"--steps: {options.steps} is too few, the first {WARM} do not count; give {WARM + 2} or more"
        )
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
                rows = list(compare(case, sides, options.rounds, options.steps))
                record(options.out, rows)
                for row in rows:
                    print(json.dumps({key: value for key, value in row.items() if key != "held"}), flush=True)
    if options.page:
        rows = [json.loads(line) for line in options.out.open(encoding="utf-8")]
        options.page.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
