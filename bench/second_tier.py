"""Cost of sending checkpoints to a store, for the training beside it, with a server of S3 on this host.

    python bench/second_tier.py [--steps 60] [--every 6] [--size 256] [--url file:///mnt/folder]

First a checkpoint of `--size` MB is sent alone: seconds, and seconds of processors that this process used,
for 1 GB; those of the server, a process of its own that yields to all others, are not in it. Then a run of
one rank and thread sends every second checkpoint, and the steps beside which something was sent are compared
with the others, of the same minutes: medians of seconds, and their ratio. On hosts whose cores the server
takes, too, the ratio has its share; with `--url` no server is started. One JSON object. Needs moto and s3fs
(the extra dev).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from urllib.error import URLError
from urllib.request import urlopen

import torch

from meshwright import api
from meshwright.checkpoint import CheckpointStore
from meshwright.runs.record import RunRecord
from meshwright.spec import load

PORT = 5997


@contextmanager
def served() -> Iterator[None]:
    """Serve S3 with one bucket, in a process that yields to all others."""
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[name] = "testing"
    url = os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{PORT}"
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    server = subprocess.Popen(
        ["nice", "-n", "19", sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(PORT)],
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            try:
                urlopen(url, timeout=1).close()
                break
            except (URLError, OSError):
                time.sleep(0.1)
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
        yield
    finally:
        server.terminate()
        server.wait()


def sent_alone(folder: Path, url: str, megabytes: int) -> dict[str, float]:
    """Seconds and seconds of processors for 1 GB of a checkpoint that is sent beside nothing."""
    store = CheckpointStore(folder, 1, remote=f"{url}/alone")
    store.save(1, {"model/a": torch.rand(megabytes * 250_000)}, {"step": 1})
    begun, used = time.perf_counter(), time.process_time()
    store.second_tier.wait(600)
    used, seconds = time.process_time() - used, time.perf_counter() - begun
    ((_, told),) = store.second_tier.events()
    store.close()
    gigabytes = told["bytes"] / 1e9
    return {
        "seconds_per_gb": round(seconds / gigabytes, 2),
        "processor_seconds_per_gb": round(used / gigabytes, 2),
    }


def trained(folder: Path, url: str, steps: int, every: int) -> dict[str, Any]:
    """Seconds of steps beside an upload and of the others, of a run that sends every second checkpoint."""
    given = {
        "model.layers": 6, "model.hidden": 256, "model.ffn": 688, "model.heads": 4, "model.kv_heads": 4,
        "model.vocab_size": 8192, "data.corpus": "synthetic", "data.seq_len": 256,
        "train.batch_tokens": 1024, "train.steps": steps, "train.eval_tokens": 1024, "train.log_every": 1,
        "checkpoint.every": every, "checkpoint.remote": f"{url}/run", "checkpoint.remote_every": 2,
    }  # fmt: skip
    spec = load(None, [(key, str(value)) for key, value in given.items()])
    steps_done: list[tuple[float, float]] = []  # (when, seconds)
    on_step = RunRecord.on_step

    def noted(record: RunRecord, row: dict[str, Any]) -> None:
        steps_done.append((time.time(), row["seconds"]))
        on_step(record, row)

    with patch.object(RunRecord, "on_step", noted):
        api.train(spec, out=folder, quiet=True, supervise=False)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    uploads = [each for each in events if each["kind"] == "uploaded"]
    sent = [(datetime.fromisoformat(each["time"]).timestamp(), each["seconds"]) for each in uploads]
    beside: list[float] = []
    others: list[float] = []
    for end, taken in steps_done[2:]:
        overlaps = any(end - taken < until and until - long < end for until, long in sent)
        (beside if overlaps else others).append(taken)
    return {
        "sent_bytes": sum(each["bytes"] for each in uploads),
        "upload_seconds": round(statistics.median(long for _, long in sent), 2),
        "steps": [len(others), len(beside)],
        "seconds": [round(statistics.median(others), 4), round(statistics.median(beside), 4)],
        "ratio": round(statistics.median(beside) / statistics.median(others), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--steps", 60), ("--every", 6), ("--size", 256)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--url", default="s3://bucket")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    server = served() if given.url == "s3://bucket" else nullcontext()
    with server, TemporaryDirectory() as temporary:
        alone = sent_alone(Path(temporary, "alone"), given.url, given.size)
        beside = trained(Path(temporary, "run"), given.url, given.steps, given.every)
    print(json.dumps({"alone": alone, "beside": beside}))


if __name__ == "__main__":
    main()
