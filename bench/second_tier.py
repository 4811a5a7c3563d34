"""Cost of sending checkpoints to a store, for the training beside it, with a server of S3 on this host.

    python bench/second_tier.py [--pairs 3] [--steps 24] [--every 4] [--size 512]

First a checkpoint of `--size` MB is sent alone: seconds, and seconds of processors that this process used,
for 1 GB; those of the server, a process of its own, are not in it. Then pairs of runs of one rank and thread,
with and without `checkpoint.remote`, which take turns: the median seconds of a step beside which something
may be sent, and the ratio in each pair. On hosts whose cores the server takes, too, the ratio has its share.
One JSON object. Needs moto and s3fs (the extra dev).
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
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch

from meshwright import api
from meshwright.checkpoint import CheckpointStore
from meshwright.spec import RunSpec, load

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


def sent_alone(folder: Path, megabytes: int) -> dict[str, float]:
    """Seconds and seconds of processors for 1 GB of a checkpoint that is sent beside nothing."""
    store = CheckpointStore(folder, 1, remote="s3://bucket/alone")
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


def spec_of(steps: int, every: int, **flags: object) -> RunSpec:
    given = {
        "model.layers": 6, "model.hidden": 256, "model.ffn": 688, "model.heads": 4, "model.kv_heads": 4,
        "model.vocab_size": 8192, "data.corpus": "synthetic", "data.seq_len": 256,
        "train.batch_tokens": 2048, "train.steps": steps, "train.eval_tokens": 2048, "train.log_every": 1,
        "checkpoint.every": every, **flags,
    }  # fmt: skip
    return load(None, [(key, str(value)) for key, value in given.items()])


def trained(folder: Path, spec: RunSpec) -> dict[str, Any]:
    """The median seconds of the steps of a run but the first, and what it sent."""
    api.train(spec, out=folder, quiet=True, supervise=False)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if "seconds" in row and "loss" in row][1:]
    sent = sum(event["bytes"] for event in events if event["kind"] == "uploaded")
    return {"seconds": statistics.median(seconds), "sent": sent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--pairs", 3), ("--steps", 24), ("--every", 4), ("--size", 512)):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with served(), TemporaryDirectory() as temporary:
        folder, rows = Path(temporary), []
        alone = sent_alone(folder / "alone", given.size)
        for pair in range(given.pairs):
            plain = trained(folder / f"plain-{pair}", spec_of(given.steps, given.every))
            url = f"s3://bucket/{pair}"
            both = spec_of(given.steps, given.every, **{"checkpoint.remote": url})
            rows.append((plain, trained(folder / f"both-{pair}", both)))
    print(
        json.dumps(
            {
                "alone": alone,
                "sent_bytes_a_run": rows[0][1]["sent"],
                "step_seconds": statistics.median(plain["seconds"] for plain, _ in rows),
                "step_seconds_with": statistics.median(both["seconds"] for _, both in rows),
                "ratios": [round(both["seconds"] / plain["seconds"], 3) for plain, both in rows],
            }
        )
    )


if __name__ == "__main__":
    main()
