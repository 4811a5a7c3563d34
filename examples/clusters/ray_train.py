"""Train a run on workers of Ray, one rank each; those that are lost are started again, and the run goes on.

ray job submit -- python ray_train.py RUN.toml /shared/run --workers 16 --gpus [--TABLE.KEY=VALUE ...]
"""

import argparse
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(run: dict[str, Any]) -> None:
    """Train as one rank of the process group that Ray has made."""
    from meshwright import api
    from meshwright.spec import load

    api.train(
        load(Path(run["file"]), run["flags"]), out=Path(run["out"]), resume="auto", doctor=run["doctor"]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "file", type=Path, help="run file, whose layout has as many ranks as there are workers"
    )
    parser.add_argument("out", type=Path, help="the run's folder, which all workers have")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="each worker has a GPU")
    parser.add_argument("--failures", type=int, default=3, help="lost workers that the run outlives")
    parser.add_argument("--no-doctor", action="store_true", help="do not examine the hosts before")
    given, flags = parser.parse_known_args()
    run = {"file": str(given.file.resolve()), "out": str(given.out.resolve()), "doctor": not given.no_doctor}
    TorchTrainer(
        train,
        train_loop_config=run | {"flags": [flag.removeprefix("--").split("=", 1) for flag in flags]},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=given.failures)),
    ).fit()
