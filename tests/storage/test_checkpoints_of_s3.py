"""A second tier of checkpoints in S3: over cut connections, without credentials, and by the command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import Bucket

from faults import same, tensors, zeros_like
from meshwright.api.start_checks import check_second_tier
from meshwright.checkpoint import CheckpointStore
from meshwright.checkpoint.directory import published
from meshwright.spec import RunSpec, UserError
from meshwright.storage import remote


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)


def saved(directory: Path, url: str, *steps: int, keep: int = 2) -> CheckpointStore:
    store = CheckpointStore(directory, keep, remote=url)
    for step in steps:
        store.save(step, tensors(step), {"step": step})
        store.second_tier.wait(60)
    store.close()
    return store


def test_checkpoints_come_back_from_s3_over_cut_connections(s3: Bucket, tmp_path: Path) -> None:
    s3.proxy.cuts, s3.proxy.done = [20, 300, 10, 150, 1], 0
    store = saved(tmp_path / "a", "s3://bucket/runs/a", 10, 20, 30)
    assert s3.proxy.done == 5 and not s3.proxy.cuts and not store.warnings
    there, here = s3.files("runs/a"), published(tmp_path / "a")
    assert list(here) == [20, 30] and {name.partition("/")[0] for name in there} == {
        "LATEST", "writer.json", "step-00000020", "step-00000030",
    }  # fmt: skip
    for path in here.values():
        assert {f.name: f.read_bytes() for f in path.iterdir()} == {
            name.partition("/")[2]: content for name, content in there.items() if name.startswith(path.name)
        }
    s3.proxy.cuts, s3.proxy.done = [100, 20, 1000], 0
    again = CheckpointStore(tmp_path / "b", 2, remote="s3://bucket/runs/a")
    again.fetch(dict)
    again.close()
    target = zeros_like(tensors(30))
    assert again.load(None, target) == {"step": 30} and same(target, tensors(30))
    assert s3.proxy.done == 3 and not again.warnings


def failed(store: CheckpointStore) -> list[str]:
    assert {kind for kind, _ in store.second_tier.events()} == {"upload_failed"}
    return [each for each in store.warnings if "training goes on" in each]


def test_a_bucket_that_is_missing_and_credentials_that_are_missing_are_told(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3fs import S3FileSystem

    for told in failed(saved(tmp_path / "a", "s3://nowhere/run", 10)):
        assert "s3://nowhere/run" in told and "bucket or folder is not there" in told and "\n" not in told
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    S3FileSystem.clear_instance_cache()
    try:
        for told in failed(saved(tmp_path / "b", "s3://bucket/runs/b", 10)):
            assert "s3://bucket/runs/b" in told and "credentials" in told and "\n" not in told
        again = CheckpointStore(tmp_path / "c", 2, remote="s3://bucket/runs/b")
        with pytest.raises(UserError, match=r"s3://bucket/runs/b.*credentials"):
            again.fetch(dict)
        again.close()
    finally:
        S3FileSystem.clear_instance_cache()
    assert s3.files("runs/b") == {}


def train(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    given = {
        "model.preset": "tiny", "model.layers": 1, "model.hidden": 32, "model.ffn": 40, "model.heads": 4,
        "model.kv_heads": 2, "model.vocab_size": 300, "data.corpus": folder / "corpus.txt",
        "data.tokenizer": "byte", "data.seq_len": 16, "train.batch_tokens": 128, "train.steps": 8,
        "train.eval_tokens": 256, "checkpoint.every": 3, "checkpoint.remote": "s3://bucket/runs/command",
    }  # fmt: skip
    keys = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    return subprocess.run(
        [sys.executable, "-m", "meshwright", "train", *keys, *flags, "--out", str(folder / "run"), "--json"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_run_of_the_command_goes_on_from_s3_when_its_folder_is_gone(s3: Bucket, tmp_path: Path) -> None:
    text = "\n".join(f"line {number} of {number * number % 97} words" for number in range(900))
    (tmp_path / "corpus.txt").write_text(text)
    result_of(train(tmp_path, "--layout.dp", "2", "--nproc", "2", "--train.stop_at", "6"))
    before = s3.files("runs/command")
    spec = RunSpec.model_validate(json.loads((tmp_path / "run" / "run.json").read_text())["spec"])
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UserError, match=r"s3://bucket/runs/command already holds checkpoints; go on with"):
        check_second_tier(spec, tmp_path / "run")
    assert s3.files("runs/command") == before

    found = result_of(train(tmp_path, "--layout.tp", "2", "--nproc", "2", "--resume", "auto"))
    assert found["steps"] == 8
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(each["kind"], each["step"]) for each in events if each["kind"] in ("fetched", "uploaded")] == [
        ("fetched", 6), ("uploaded", 8),
    ]  # fmt: skip
