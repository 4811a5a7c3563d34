"""Runs with a second tier of checkpoints: nothing waits for the store, and a lost folder costs no bit."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from covering import each_choice, marked
from meshwright import api
from meshwright.api.start_checks import check_folder, check_second_tier
from meshwright.checkpoint.directory import latest_step, published
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.spec.errors import Stopped, UserError
from meshwright.storage import remote
from meshwright.storage.remote_folder import RemoteFolder
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from ranks import Ranks
from training_runs import HALF, STEPS, Notes, run_and_watch, spec_of, start


def tiered(corpus: Path, url: Path, **flags: object) -> RunSpec:
    given = {"layout__dp": 2, "checkpoint__every": 2, "checkpoint__keep": 9, **flags}
    return spec_of(corpus, checkpoint__remote=f"file://{url}", **given)


def of_copies(events: list[Any]) -> list[tuple[str, int]]:
    kinds = ("uploaded", "upload_failed", "upload_left_out", "fetched")
    return [(kind, fields["step"]) for kind, fields in events if kind in kinds]


def sentences(events: list[Any]) -> list[str]:
    return [fields["message"] for kind, fields in events if kind == "warning"]


@pytest.mark.parametrize(
    "layout",
    [
        {"layout__dp": 2},
        pytest.param({"layout__dp": 1}, marks=pytest.mark.full),
        pytest.param({"layout__dp": 1, "layout__tp": 2}, marks=pytest.mark.full),
        {"layout__dp": 2, "layout__pp": 2, "layout__zero": 1},
    ],
)
def test_a_run_whose_folder_is_lost_goes_on_from_the_store_bit_for_bit(
    ranks: Ranks, corpus: Path, tmp_path: Path, layout: dict[str, object]
) -> None:
    spec = tiered(corpus, tmp_path / "store")
    until = tiered(corpus, tmp_path / "store", train__stop_at=HALF + 1)
    _, events = ranks.run(spec.layout, run_and_watch, until, tmp_path / "a")[0]
    assert not sentences(events) and of_copies(events)[-1] == ("uploaded", HALF + 1)
    twin = shutil.copytree(tmp_path / "a", tmp_path / "twin")
    shutil.copytree(tmp_path / "store", tmp_path / "twin store")
    shutil.rmtree(tmp_path / "a")

    other = tiered(corpus, tmp_path / "store", **layout)
    _, events = ranks.run(other.layout, run_and_watch, other, tmp_path / "b", "auto")[0]
    assert of_copies(events)[0] == ("fetched", HALF + 1) and not sentences(events)
    found = ranks.run(other.layout, digest_of, other, tmp_path / "b")[0]
    of_twin = tiered(corpus, tmp_path / "twin store", **layout)
    with patch.object(RemoteFolder, "fetch", side_effect=AssertionError):
        whole, _ = start(ranks, of_twin, twin, "auto")
    assert found == (whole["parameters_sha256"], whole["samples_sha256"])
    if other.layout == spec.layout:
        uninterrupted, _ = start(ranks, spec_of(corpus, layout__dp=2), tmp_path / "whole")
        assert found == (uninterrupted["parameters_sha256"], uninterrupted["samples_sha256"])


def digest_of(mesh: Mesh, spec: RunSpec, out: Path) -> tuple[str, str]:
    """The hashes of parameters and samples of a run that has ended."""
    result = open_run(spec, mesh, out, Observers([])).execute("auto")
    assert result["steps"] == STEPS
    return result["parameters_sha256"], result["samples_sha256"]


class Held(Notes):
    """Lets the store answer once the run has taken a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.go, self._step = threading.Event(), step

    def on_step(self, row: dict[str, Any]) -> None:
        super().on_step(row)
        if row["step"] == self._step:
            self.go.set()


def trained_while_the_store_is_held(mesh: Mesh, spec: RunSpec, out: Path) -> tuple[str, list[Any]]:
    """The run's digest, and its events, where no request is answered before the last step is done."""
    notes, asked = Held(STEPS), RemoteFolder._asked

    def held(*given: Any, **named: Any) -> Any:
        assert threading.current_thread().name != "MainThread"
        assert notes.go.wait(60)
        return asked(*given, **named)

    with patch.object(RemoteFolder, "_asked", held):
        result = open_run(spec, mesh, out, Observers([notes])).execute(None)
    return result["parameters_sha256"], notes.events


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_training_waits_for_no_request_to_the_store(
    ranks: Ranks, corpus: Path, tmp_path: Path, asynchronous: str
) -> None:
    """With a store that does not answer all steps and saves are done; the end waits for the last copy."""
    spec = tiered(corpus, tmp_path / "store", checkpoint__asynchronous=asynchronous)
    found = ranks.run(spec.layout, trained_while_the_store_is_held, spec, tmp_path / "a")
    whole, _ = start(ranks, spec_of(corpus, layout__dp=2), tmp_path / "whole")
    assert [digest for digest, _ in found] == [whole["parameters_sha256"]] * 2
    events = found[0][1]
    assert [fields["step"] for kind, fields in events if kind == "checkpoint"] == [2, 4, 6, 8, 10]
    assert of_copies(events)[-1] == ("uploaded", STEPS)
    assert latest_step(tmp_path / "store") == STEPS
    assert not of_copies(found[1][1])


def with_failing_store(mesh: Mesh, spec: RunSpec, out: Path, fails: tuple[int, ...]) -> tuple[str, list[Any]]:
    """The digest and the events of a run that lacks credentials for the files of some steps."""
    notes, send = Notes(), RemoteFolder.send

    def refused(folder: RemoteFolder, file: Path, name: str) -> None:
        if any(f"step-{step:08d}" in name for step in fails) and name.endswith("rank-00001.bin"):
            raise UserError(f"checkpoint.remote: {name} cannot be written (Forbidden); see your credentials")
        time.sleep(0.05)
        send(folder, file, name)

    with patch.object(RemoteFolder, "send", refused), patch.object(remote, "FIRST_WAIT", 0.0):
        result = open_run(spec, mesh, out, Observers([notes])).execute(None)
    return result["parameters_sha256"], notes.events


@pytest.mark.filterwarnings("ignore:step-0000.* is not copied", "ignore:checkpoint.remote")
@pytest.mark.parametrize("last", [False, True])
def test_an_upload_that_fails_is_told_and_training_goes_on(
    ranks: Ranks, corpus: Path, tmp_path: Path, last: bool
) -> None:
    spec = tiered(corpus, tmp_path / "store", checkpoint__every=5)
    fails = (HALF, STEPS) if last else (HALF,)
    found = ranks.run(spec.layout, with_failing_store, spec, tmp_path / "a", fails)
    whole, _ = start(ranks, spec_of(corpus, layout__dp=2), tmp_path / "whole")
    assert [digest for digest, _ in found] == [whole["parameters_sha256"]] * 2
    events = found[0][1]
    copies = of_copies(events)
    assert ("upload_failed", HALF) in copies or ("upload_left_out", HALF) in copies
    assert not of_copies(found[1][1])
    if last:
        assert copies[-1] == ("upload_failed", STEPS)
        assert not [*(tmp_path / "store").rglob("manifest.json")]
        assert (
            "is not in" in sentences(events)[-1] and "--resume auto, which sends it" in sentences(events)[-1]
        )
        assert any("Forbidden" in told and "training goes on" in told for told in sentences(events))
        again = ranks.run(spec.layout, run_and_watch, spec, tmp_path / "a", "auto")[0][1]
        assert of_copies(again) == [("uploaded", STEPS)] and latest_step(tmp_path / "store") == STEPS
    else:
        assert copies[-1] == ("uploaded", STEPS) and latest_step(tmp_path / "store") == STEPS


class Stops(Notes):
    def on_step(self, row: dict[str, Any]) -> None:
        super().on_step(row)
        if row["step"] == HALF:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(mesh: Mesh, spec: RunSpec, out: Path, pause: float) -> tuple[float, list[Any]]:
    """Seconds from a signal to the end of the run, whose store takes `pause` seconds for each file."""
    notes, send, at = Stops(), RemoteFolder.send, [0.0]
    kill = os.kill

    def slow(folder: RemoteFolder, file: Path, name: str) -> None:
        time.sleep(pause)
        send(folder, file, name)

    def noted(*given: int) -> None:
        at[0] = time.monotonic()
        kill(*given)

    with patch.object(RemoteFolder, "send", slow), patch.object(os, "kill", noted):
        with pytest.raises(Stopped):
            open_run(spec, mesh, out, Observers([notes])).execute(None)
        return time.monotonic() - at[0], notes.events


@pytest.mark.filterwarnings("ignore:checkpoint.remote")
def test_a_signal_leaves_the_copy_the_time_of_grace(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = tiered(corpus, tmp_path / "store", checkpoint__every=0, recovery__grace_seconds=8)
    _, events = ranks.run(spec.layout, stopped, spec, tmp_path / "a", 0.3)[0]
    (step,) = published(tmp_path / "store")
    assert step == latest_step(tmp_path / "a" / "checkpoints")
    assert of_copies(events) == [("uploaded", step)] and not sentences(events)

    spec = tiered(corpus, tmp_path / "slow", checkpoint__every=0, recovery__grace_seconds=8)
    for seconds, events in ranks.run(spec.layout, stopped, spec, tmp_path / "b", 20.0):
        assert 2.0 < seconds < 8.0 and not of_copies(events)
    (told,) = sentences(ranks.run(spec.layout, stopped, spec, tmp_path / "c", 20.0)[0][1])
    assert "is not in" in told and "this run has sent none" in told
    assert not published(tmp_path / "slow")


@pytest.mark.filterwarnings("ignore:file:")
def test_a_half_checkpoint_that_latest_names_is_passed_over(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = tiered(corpus, tmp_path / "store", checkpoint__every=5)
    whole, _ = start(ranks, spec, tmp_path / "a")
    (published(tmp_path / "store")[STEPS] / "part-00000.json").unlink()
    _, events = ranks.run(spec.layout, run_and_watch, spec, tmp_path / "b", "auto")[0]
    assert of_copies(events)[0] == ("fetched", HALF)
    (told,) = sentences(events)
    assert "step-00000010/part-00000.json is missing" in told and "step-00000005 is used instead" in told
    found, _ = start(ranks, spec, tmp_path / "b", "auto")
    assert found["parameters_sha256"] == whole["parameters_sha256"]


def test_another_runs_store_is_refused_before_a_byte_is_fetched(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    start(ranks, tiered(corpus, tmp_path / "store"), tmp_path / "a")
    other = tiered(corpus, tmp_path / "store", train__lr=0.5)
    for error in ranks.run(other.layout, refused, other, tmp_path / "b"):
        assert f"in file://{tmp_path}/store is of another run: train.lr was 0.01 and is 0.5" in error
    assert not published(tmp_path / "b" / "checkpoints")


def refused(mesh: Mesh, spec: RunSpec, out: Path) -> str:
    with pytest.raises(UserError) as told:
        open_run(spec, mesh, out, Observers([])).execute("auto")
    return str(told.value)


def test_checkpoints_that_a_run_has_lost_are_fetched_and_others_refused(corpus: Path, tmp_path: Path) -> None:
    """The folder of the run is there, and its record tells of a checkpoint."""
    spec = tiered(corpus, tmp_path / "store", layout__dp=1, train__stop_at=HALF)
    flags = {"quiet": True, "supervise": False}
    api.train(spec, out=tmp_path / "a", **flags)
    for path in (tmp_path / "a" / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    check_folder(spec, tmp_path / "a", "auto")
    (tmp_path / "a" / "checkpoints" / "LATEST").unlink()
    check_folder(spec, tmp_path / "a", "auto")
    with pytest.raises(UserError, match=r"holds no checkpoint, but .* has saved one at step 5"):
        check_folder(spec_of(corpus), tmp_path / "a", "auto")
    whole = api.train(spec_of(corpus), out=tmp_path / "whole", **flags)
    spec = tiered(corpus, tmp_path / "store", layout__dp=1)
    found = api.train(spec, out=tmp_path / "a", resume="auto", **flags)
    assert found["parameters_sha256"] == whole["parameters_sha256"]
    with pytest.raises(UserError, match=r"checkpoint\.remote: file://.* already holds checkpoints; go on"):
        api.train(spec, out=tmp_path / "b", **flags)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"checkpoint__remote": "bucket/run"},
            "has no scheme, by which a URL says what it is of; give one such as",
        ),
        (
            {"checkpoint__remote": "https://host/run"},
            "https://host/run cannot be written to; give one such as",
        ),
        ({"checkpoint__remote": "s3://"}, "'s3://' names no bucket or folder; give one, such as"),
        ({"checkpoint__remote": "file:///"}, "'file:///' names no bucket or folder; give one, such as"),
        ({"checkpoint__remote": "memory://run"}, "is the memory of a process, and gone with it"),
        ({"checkpoint__remote": "sftp://me:secret@host/run"}, "the URL of host has a password"),
        ({"checkpoint__remote_every": 2}, "counts the checkpoints that are copied to checkpoint.remote"),
    ],
)
def test_a_url_that_is_no_store_is_a_sentence(corpus: Path, flags: dict[str, object], told: str) -> None:
    with pytest.raises(UserError) as error:
        spec_of(corpus, **flags)
    assert told in str(error.value) and "secret" not in str(error.value)


def test_a_protocol_without_its_package_is_told_at_the_start(corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, checkpoint__remote="nowhere://bucket/run")
    with pytest.raises(UserError, match=r"checkpoint\.remote: nowhere://bucket/run begins with nowhere://"):
        check_second_tier(spec, tmp_path)


STARTS: list[dict[str, Any]] = [
    {"place": place, "resume": resume}
    for place, resume in product(("run/checkpoints", "run/checkpoints/other", "run", "."), (None, "auto"))
]


@pytest.mark.parametrize("case", marked(STARTS, each_choice(STARTS)))
def test_a_second_tier_in_the_place_of_the_first_is_refused(
    corpus: Path, tmp_path: Path, case: dict[str, Any]
) -> None:
    spec, out = tiered(corpus, tmp_path / case["place"]), tmp_path / "run"
    with pytest.raises(UserError, match=r"checkpoint\.remote: file://.* is not apart from .*run"):
        api.train(spec, out=out, resume=case["resume"], quiet=True)
    assert not out.exists() or not (out / "checkpoints").exists()
