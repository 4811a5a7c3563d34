"""`meshwright verify` of the layouts that fit the GPUs, on small models.

On one GPU that is one rank by format and recipe, and two ranks that share it, where NCCL takes that
(`tests/gpu/one_device.py`). Where the device is faked, rank 0 of each layout takes a step without values.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

from gpu_day.commands import environment, last_lines, last_object, python, run_limited
from gpu_day.results import Row, Work

AT_ONCE = 3
"""Commands at a time that take one GPU each."""
LONGEST = 75.0
"""Limit in seconds of a command."""
BASE = {"data.corpus": "synthetic", "data.seq_len": "128", "train.batch_tokens": "2048"}
TINY, MOE = {"model.preset": "tiny"}, {"model.preset": "moe-tiny"}
BF16 = {"precision.compute": "bf16"}
Flags = dict[str, str]

ONE_RANK: dict[str, Flags] = {
    "one rank, bf16": TINY | BF16,
    "one rank, fp8": TINY | {"precision.compute": "fp8"},
    "one rank, bf16, compiled": TINY | BF16 | {"train.compile": "true"},
    "one rank, experts, bf16": MOE | BF16,
}
EIGHT: dict[str, Flags] = {
    "dp 8, ZeRO-3": TINY | BF16 | {"layout.dp": "8", "layout.zero": "3"},
    "tp 8": TINY | BF16 | {"model.kv_heads": "8", "layout.tp": "8"},
    "pp 2 x tp 4": TINY | BF16 | {"layout.pp": "2", "layout.tp": "4"},
    "ep 8": MOE | BF16 | {"layout.dp": "8", "layout.ep": "8"},
    "cp 2 x dp 4": TINY | BF16 | {"layout.cp": "2", "layout.dp": "4"},
}


def layouts(gpus: int) -> dict[str, Flags]:
    """The layouts for so many GPUs: of eight first those that take all."""
    return (EIGHT if gpus >= 8 else {}) | ONE_RANK


def words_of(flags: Flags) -> list[str]:
    """The words of `meshwright verify` for a layout."""
    pairs = [(f"--{key}", value) for key, value in (BASE | flags).items()]
    return ["verify", *(word for pair in pairs for word in pair), "--steps", "2", "--json"]


def run(work: Work) -> None:
    """A row for each layout with its verdict."""
    if work.faked:
        for name, flags in layouts(work.task.gpus).items():
            work.attempt(_told(name, flags), partial(dry_run, BASE | flags))
        for name, spec in _shared():
            work.attempt({"layout": f"two ranks on one GPU, {name}"}, partial(dry_run_of, spec))
        return
    several = {name: flags for name, flags in layouts(work.task.gpus).items() if name in EIGHT}
    for name, flags in several.items():
        work.attempt(_told(name, flags), partial(verdict, work, name, flags))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun = {pool.submit(verdict, work, name, flags): (name, flags) for name, flags in ONE_RANK.items()}
        for done in as_completed(begun):
            work.attempt(_told(*begun[done]), done.result)
    if work.task.gpus == 1:
        two_ranks(work)


def _told(name: str, flags: Flags) -> Row:
    return {"layout": name, "command": " ".join(["meshwright", *words_of(flags)])}


def verdict(work: Work, name: str, flags: Flags) -> Row:
    """The verdict of a layout, by the command line."""
    log = work.folder / f"verify-{''.join(c if c.isalnum() else '-' for c in name)}.log"
    began, command = time.monotonic(), python("-m", "meshwright", *words_of(flags))
    code = run_limited(command, min(work.left - 5, LONGEST), log, environment())
    seconds = {"seconds": round(time.monotonic() - began, 1)}
    found = last_object(log)
    if code is None or found is None or "equal" not in found:
        why = "it took too long" if code is None else last_lines(log, 2)
        return seconds | {"error": f"exit code {code}: {why}"}
    own = found.get("own") or {}
    return seconds | {
        "equal": found["equal"],
        "worst_relative": found["worst_relative"],
        "worst_name": found["worst_name"],
        "compared": found["compared"],
        "own_worst_relative": own.get("worst_relative"),
        "own_tolerance": own.get("tolerance"),
        "first": found["first"],
    }


def two_ranks(work: Work) -> None:
    """Layouts of two ranks that share a GPU, in the first way that NCCL takes."""
    from one_device import WAYS

    for way in WAYS:
        folder, log = work.folder / f"two-ranks-{way}", work.folder / f"two-ranks-{way}.log"
        folder.mkdir(exist_ok=True)
        told = {"layout": f"two ranks on one GPU, by {way}"}
        if work.left < 15:
            work.leave_out(told["layout"])
            continue
        command = python("-m", "one_device", "--way", way, "--out", str(folder))
        code = run_limited(command, work.left - 5, log, environment())
        file = folder / "0.json"
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for name, worst in found.get("found", {}).items():
            row = {
                "layout": f"two ranks on one GPU, {name}",
                "worst_relative": worst,
                "equal": worst <= 1e-10,
            }
            work.add(row)
        if "found" in found:
            return
        why = found.get("refused") or f"exit code {code}: {last_lines(log, 2)}"
        work.add(told | {"error": str(why)})


def _shared() -> Iterator[tuple[str, Any]]:
    """The runs of two ranks that share a GPU."""
    from one_device import BASE as SHARED
    from one_device import CASES

    from small import spec_of

    for name, flags in CASES.items():
        yield name, spec_of(SHARED, **{"data.corpus": "synthetic"} | flags)


def dry_run(flags: Flags) -> Row:
    """A step of rank 0 on the faked device, of a run by its flags."""
    from meshwright.api.verify_runs import check_way
    from meshwright.spec import load

    spec = load(None, list(flags.items()))
    check_way(spec, None, None, "both")
    return dry_run_of(spec)


def dry_run_of(spec: Any) -> Row:
    """A step of rank 0 on the faked device: what it launches, and the races of its streams."""
    from gpu_day.devices import device_here
    from meshwright.dryrun.races import races
    from meshwright.dryrun.rank_step import rehearse
    from meshwright.dryrun.trace import Trace

    device = device_here()
    trace = Trace(device)
    rehearse(spec, 0, device, trace)
    launched = sum(each.kind in ("kernel", "copy") for each in trace.events)
    return {"launches": launched, "races": sum(1 for _ in races(trace.events))}
