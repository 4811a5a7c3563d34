"""Share of a training step that making its batch takes.

    python bench/loading.py [--model small] [--threads 2] [--steps 12] [--megabytes 100]

One process trains on token files of random bytes, 8 sequences of 512 a step. The loader makes the next batch
in the background, so a step pays for it twice: it may wait for the batch, and the making takes time of the
cores. Both are told in percent of a step, medians: the wait by the clock, and the making by the time of its
own thread, beside the processor time of the whole step. Samples lie anywhere, so most blocks are read, and
compared with their hashes, for the first time. One JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.parallel.precision import use_fast_fp32_matmul
from meshwright.rank.env import keep_freed_memory
from throughput import SEQUENCES, small_run
from token_files import write
from world import join, trainer_of


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of a step."""
    spec = small_run(
        model__preset=options.model,
        layout__micro_batch=SEQUENCES,
        data__corpus=str(folder / "tokens"),
        data__tokenizer="byte",
        data__cache=str(folder / "cache"),
    )
    trainer, _ = trainer_of(spec, torch.device("cpu"))
    loader = Loader(open_corpus(spec), spec, 0, 1)
    waits, steps, whole = [], [], []
    for number in range(options.steps):
        start, used = time.perf_counter(), time.process_time()
        batch = loader.step(number)
        waits.append(time.perf_counter() - start)
        trainer.step(batch, number + 1)
        steps.append(time.perf_counter() - start)
        whole.append(time.process_time() - used)
    making = []
    for number in range(options.steps, 2 * options.steps):
        used = time.thread_time()
        loader._make(number)
        making.append(time.thread_time() - used)
    loader.close()
    wait, step, cpu = (statistics.median(each[2:]) for each in (waits, steps, whole))
    batch_cpu = statistics.median(making[2:])
    return {
        "model": options.model,
        "threads": options.threads,
        "step_ms": round(1e3 * step, 1),
        "wait_ms": round(1e3 * wait, 3),
        "wait_percent": round(100 * wait / step, 3),
        "step_processor_ms": round(1e3 * cpu, 1),
        "making_processor_ms": round(1e3 * batch_cpu, 3),
        "making_percent": round(100 * batch_cpu / cpu, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="small")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--megabytes", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    use_fast_fp32_matmul(torch.device("cpu"))
    with TemporaryDirectory() as folder:
        write(Path(folder) / "tokens", options.megabytes)
        join("cpu", str(Path(folder) / "store"), 0, 1)
        print(json.dumps(measure(options, Path(folder))), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
