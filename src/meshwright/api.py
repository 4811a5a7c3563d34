"""Meshwright from Python: what the command line calls, and nothing more.

from meshwright import api
from meshwright.spec import load

result = api.train(load(Path("run.toml")), nproc=2, out=Path("runs/first"))
print(api.generate(Path("runs/first"), "def "))
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.planner.pipeline import Durations, Machine
from meshwright.planner.pipeline import step as pipeline_step
from meshwright.planner.plan import Plan as Plan
from meshwright.planner.plan import Plans as Plans
from meshwright.planner.plan import estimate as estimate
from meshwright.planner.plan import plan as plan
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.rules import ranks_match

if TYPE_CHECKING:
    import torch

    from meshwright.data.corpus import Corpus
    from meshwright.data.tokenize import Counts
    from meshwright.model.decoder import Decoder
    from meshwright.train.observer import Observers

Result = dict[str, Any]


def train(
    spec: RunSpec,
    *,
    nproc: int | None = None,
    out: Path | None = None,
    resume: str | int | None = None,
    quiet: bool = False,
) -> Result:
    """Train on `nproc` local ranks (default: the layout's world size) and return the run's result.

    The run's folder is `out` (default `runs/<time>`). `resume` is None, "auto" (from the newest checkpoint of
    that folder, or from the start where there is none) or a step. The result has `final_loss`,
    `val_bits_per_byte`, `tokens_per_second`, `mfu`, `peak_memory_bytes`, `parameters_sha256`,
    `samples_sha256`, `steps` and more. Raises `UserError`.
    """
    from meshwright.launch import run_ranks

    ranks = spec.layout.world_size if nproc is None else nproc
    ranks_match(spec, ranks)
    out = Path(out) if out else default_out()
    resume = str(resume) if resume is not None else None
    if ranks == 1:
        return train_worker(spec, out=out, resume=resume, quiet=quiet)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        file = _write_spec(spec, Path(folder))
        argv = ["train", str(file), "--out", str(out)]
        argv += ["--resume", resume] if resume is not None else []
        argv += ["--quiet"] if quiet else []
        run_ranks(argv, ranks, log_dir=Path(folder) / "logs").raise_for_failure()
    return _read_result(out / "result.json")


def train_worker(spec: RunSpec, *, out: Path, resume: str | None = None, quiet: bool = False) -> Result:
    """Train as one rank of the world that torchrun describes, or alone; every rank returns the result."""
    from meshwright.checkpoint import Lease
    from meshwright.checkpoint.ranks import Ranks
    from meshwright.infer.sample import held_out_sample
    from meshwright.launch.world import mesh_of
    from meshwright.report import write_report
    from meshwright.train.loop import Run
    from meshwright.train.observer import Observers

    with mesh_of(spec) as mesh, ExitStack() as stack:
        first, ranks = mesh.world.rank == 0, Ranks(mesh.control.group)

        def start() -> Observers:
            if not first:
                return Observers([])
            _check_folder(spec, out, resume)
            if spec.checkpoint.folder(out).resolve() != out.resolve():  # else the checkpoints' own lease does
                _make_folder(out)
                stack.enter_context(Lease(out, "meshwright"))
            return _observers(spec, out, quiet)

        watching = stack.enter_context(ranks.together(start))
        run = Run(spec, mesh, out, watching)
        ranks.together(lambda: _keep_tokenizer(run.corpus, out, spec.model.max_seq_len) if first else None)
        result = run.execute(resume)
        result["sample"] = held_out_sample(run.trainer, run.corpus)
        ranks.together(lambda: watching.on_end(result))
        if first:
            write_report(out)
    return result


def _check_folder(spec: RunSpec, out: Path, resume: str | None) -> None:
    """Refuse a start that would bury what the folder `out` holds."""
    from meshwright.checkpoint.directory import candidates, latest_step
    from meshwright.report.record import last_checkpoint

    checkpoints = spec.checkpoint.folder(out)
    if resume is None:
        if (out / "run.json").exists():
            raise UserError(
                f"--out: {out} already holds a run; go on with --resume auto, or give another --out"
            )
    elif resume != "auto":
        if not resume.isdecimal():
            raise UserError(f"--resume: {resume!r} is neither 'auto' nor a step")
        candidates(checkpoints, int(resume))
    elif latest_step(checkpoints) is None and (before := last_checkpoint(out)) is not None:
        raise UserError(
            f"--resume: {checkpoints} holds no checkpoint, but {out} has saved one at step {before}; give "
            f"the checkpoint.dir that it had, put them back, or give another --out"
        )


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be made ({error.strerror}); give another --out") from error


def _keep_tokenizer(corpus: Corpus, out: Path, max_seq_len: int) -> None:
    """Put the tokenizer into the run's folder, where `generate` and `export` look for it."""
    if not corpus.has_text or (out / "tokenizer.json").exists():
        return
    _make_folder(out)
    corpus.tokenizer.save(out, max_seq_len)


def _observers(spec: RunSpec, out: Path, quiet: bool) -> Observers:
    from meshwright.report import Progress, RunRecord, make_trackers
    from meshwright.train.observer import Observers

    record = RunRecord(out)
    shown = [] if quiet else [Progress()]
    return Observers([record, *shown, *make_trackers(spec.train.trackers, out, out.name, spec.to_json())])


def verify(spec: RunSpec, *, nproc: int | None = None, steps: int = 3) -> Result:
    """Compare the layout with one device in float64 over `steps` optimiser steps.

    Returns `equal`, `worst_relative`, `worst_name`, `compared`, `tolerance`, `narrowed` (a sentence, or None)
    and `rows`, one for each kind of value. Raises `UserError`.
    """
    from meshwright.launch import run_ranks

    ranks = spec.layout.world_size if nproc is None else nproc
    ranks_match(spec, ranks)
    if steps < 1:
        raise UserError(f"steps: {steps} steps compare nothing; give 1 or more")
    if ranks == 1:
        return verify_worker(spec, steps=steps)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        file, out = _write_spec(spec, Path(folder)), Path(folder) / "out"
        argv = ["verify", str(file), "--steps", str(steps), "--out", str(out)]
        run_ranks(argv, ranks, log_dir=Path(folder) / "logs").raise_for_failure()
        return _read_result(out / "verify.json")


def verify_worker(spec: RunSpec, *, steps: int = 3, out: Path | None = None) -> Result:
    """`verify` as one rank: the first returns the result and writes `out`/verify.json, others return {}."""
    from meshwright.checkpoint.ranks import Ranks
    from meshwright.launch.world import mesh_of
    from meshwright.train.verify import verify as verify_rank

    with mesh_of(spec) as mesh:
        found = verify_rank(spec, mesh, steps) or {}
        ranks = Ranks(mesh.control.group)
        ranks.together(lambda: write_verdict(found, out) if found and out is not None else None)
    return found


def write_verdict(found: Result, out: Path) -> None:
    """Write what `verify` found to `out`/verify.json."""
    from meshwright.report.record import write_atomically

    _make_folder(out)
    write_atomically(out / "verify.json", json.dumps(found))


def simulate(
    spec: RunSpec,
    *,
    durations: tuple[float, float, float] | None = None,
    flops: float = Machine.flops,
    latency: float = Machine.latency,
    bandwidth: float = Machine.bandwidth,
    out: Path | None = None,
    trace: Path | None = None,
) -> Result:
    """Time one step of the run's pipeline, without torch and without its ranks.

    `durations` are the seconds of one microbatch's F, I and W in every stage; without them the stages' FLOPs
    are counted, and a device does `flops` of them a second. A message between stages takes `latency` seconds
    and its bytes / `bandwidth`. `out` is where the timeline's page goes, `trace` the trace for Perfetto.
    Returns `step_seconds`, `bubble`, `bubbles`, `peak_activations` (in microbatches through all of a rank's
    stages) and `peak_activation_bytes` (of one device) by rank, `closed_form_bubble` (or None) and more.
    Raises `UserError`.
    """
    from meshwright.report.timeline import write_timeline, write_trace
    from meshwright.schedule import ScheduleError

    try:
        machine = Machine(flops, latency, bandwidth)
        found = pipeline_step(spec, machine, Durations(*durations) if durations else None)
    except ScheduleError as error:
        raise UserError(str(error)) from None
    if out is not None:
        write_timeline(found.simulation, Path(out))
    if trace is not None:
        write_trace(found.simulation, Path(trace))
    return {
        **found.to_json(),
        "flops": None if durations else flops,
        "latency": latency,
        "bandwidth": bandwidth,
    }


def goodput(
    *,
    step_seconds: float,
    save_seconds: float,
    restart_seconds: float,
    mtbf_hours: float | None = None,
    device_mtbf_hours: float | None = None,
    devices: int | None = None,
    background_seconds: float = 0.0,
    batch_tokens: int | None = None,
    tokens: float | None = None,
    price: float | None = None,
    every: int | None = None,
    runs: int | None = None,
    seed: int = 0,
) -> Result:
    """What failures leave of a run's time, without torch: the best checkpoint interval and what follows.

    The system fails every `mtbf_hours` on average, or each of its `devices` every `device_mtbf_hours`; a save
    stops training for `save_seconds` and is complete `background_seconds` later; a restart takes
    `restart_seconds`. Returns `interval_steps`, the time's shares `effective`, `saving`, `lost_work` and
    `restarting`, `tokens_per_day`, `days`, `cost` (of `tokens`, at `price` a device-hour) and more. `every`
    is a number of steps between saves to take instead; `runs` simulates so many runs too. Raises `UserError`.
    """
    from meshwright.planner import goodput as planner
    from meshwright.planner.fault_simulation import simulate as play

    mtbf = planner.system_mtbf(mtbf_hours, device_mtbf_hours, devices)
    faults = planner.Faults(mtbf, save_seconds, restart_seconds, background_seconds)
    found = planner.goodput(
        step_seconds,
        faults,
        batch_tokens=batch_tokens,
        tokens=tokens,
        devices=devices,
        price=price,
        every=every,
    )
    if runs is None:
        return {**found.to_json(), "simulated": None}
    played = play(faults, found.interval_seconds, found.saves or 1000, runs, seed)
    return {**found.to_json(), "simulated": played.to_json()}


def generate(
    run: Path,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """The continuation of `prompt` by the newest checkpoint of a run's folder, or by an HF folder."""
    from meshwright.data.tokenizer import Tokenizer
    from meshwright.infer.generate import generate as continue_tokens

    decoder, tokenizer_file = _load_any(Path(run))
    if not tokenizer_file.is_file():
        raise UserError(f"{run}: has no tokenizer.json, so text cannot be turned into tokens")
    tokenizer = Tokenizer.open(tokenizer_file)
    given = tokenizer.encode(_encodable(prompt))
    found = continue_tokens(
        decoder,
        tokenizer.prompt(given),
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_id=tokenizer.end_id,
        limit=tokenizer.vocab_size,
    )
    # Some tokenizers drop the space before the first word that they decode: so decode both, and cut.
    return tokenizer.decode([*given, *found])[len(tokenizer.decode(given)) :]


def _encodable(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt: is not valid text ({error.reason} at character {error.start})") from None
    return prompt


def tokenize(
    corpus: str,
    tokenizer: str,
    out: Path,
    *,
    vocab_size: int,
    text_key: str = "text",
    val_fraction: float = 0.0,
) -> Counts:
    """Turn a corpus into a folder of token shards that `data.corpus` can name; returns what it counted.

    `tokenizer` is 'bpe' (trained to `vocab_size`), 'bpe:N', 'byte' or a tokenizer.json; a trained one does
    not see the share `val_fraction` of the documents, which a run with that fraction holds out.
    """
    from meshwright.data.tokenize import tokenize as write

    return write(
        corpus, tokenizer, Path(out), vocab_size=vocab_size, text_key=text_key, val_fraction=val_fraction
    )


def export(run: Path, folder: Path, dtype: str | None = None) -> None:
    """Write a run's newest checkpoint as an HF folder, in 'float32', 'bfloat16' or 'float16', or as saved."""
    import torch

    from meshwright.checkpoint.hf import export_hf

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in known:
        raise UserError(f"dtype: {dtype!r} is not one of {', '.join(known)}")

    run = Path(run)
    decoder = load_run(run)
    tokenizer = run / "tokenizer.json"
    export_hf(
        folder,
        decoder.spec,
        decoder.tensors(),
        tokenizer if tokenizer.is_file() else None,
        known[dtype] if dtype else None,
        side_files=run,
    )


def import_hf(folder: Path, out: Path) -> None:
    """Make a run's folder out of an HF folder; `train OUT --resume auto` goes on from its step 0."""
    from meshwright.infer.load import import_run

    import_run(Path(folder), Path(out))


def checkpoint_list(directory: Path) -> list[Result]:
    """The checkpoints of a run's folder, or of a folder of checkpoints: step, bytes, ranks, problem, ..."""
    from meshwright.checkpoint.inspect import list_checkpoints

    rows = []
    for info in list_checkpoints(checkpoints_of(Path(directory))):
        row: Result = {"step": info.step, "bytes": info.bytes, "tensors": info.tensors, "ranks": info.ranks}
        row |= {"saved_at": info.saved_at, "layout": info.state.get("layout"), "latest": info.latest}
        rows.append(row | {"problem": info.problem})
    return rows


def checkpoint_verify(directory: Path, step: int | None = None) -> Result:
    """Check every hash of the checkpoint of `step` (default: the latest); `problems` lists the damage."""
    from meshwright.checkpoint.inspect import verify_checkpoint

    report = verify_checkpoint(checkpoints_of(Path(directory)), step)
    return {**asdict(report), "path": str(report.path), "problems": list(report.problems)}


def checkpoints_of(folder: Path) -> Path:
    """Where a run's folder has its checkpoints; any other folder is taken as one of checkpoints."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; give the folder of a run, or of its checkpoints")
    if (folder / "run.json").is_file():
        return load(folder).checkpoint.folder(folder)
    inner = folder / "checkpoints"  # of a run whose record is gone
    return inner if inner.is_dir() else folder


def load_hf(folder: Path | str) -> Decoder:
    """The decoder of an HF folder, in eval mode: tokens (B, T) -> logits (B, T, V)."""
    from meshwright.checkpoint.hf import load_hf as load_folder

    return load_folder(Path(folder))


def load_run(run: Path, dtype: torch.dtype | None = None) -> Decoder:
    """The decoder of a run's newest checkpoint, on one device, in eval mode."""
    from meshwright.infer.load import load_run as load_decoder

    return load_decoder(Path(run), dtype)


def _load_any(folder: Path) -> tuple[Decoder, Path]:
    if (folder / "run.json").is_file():
        return load_run(folder), folder / "tokenizer.json"
    if (folder / "config.json").is_file():
        return load_hf(folder), folder / "tokenizer.json"
    raise UserError(f"{folder}: is neither a run's folder (run.json) nor an HF folder (config.json)")


def default_out() -> Path:
    """A new folder under runs/, named by the time."""
    base = Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    return next(path for path in (base, *(Path(f"{base}-{i}") for i in range(2, 10**6))) if not path.exists())


def _write_spec(spec: RunSpec, folder: Path) -> Path:
    file = folder / "run.json"
    file.write_text(json.dumps({"spec": spec.to_json()}), encoding="utf-8")
    return file


def _read_result(file: Path) -> Result:
    return dict(json.loads(file.read_text(encoding="utf-8")))
