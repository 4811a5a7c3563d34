"""Train a run on workers of Ray, one rank each; those that are lost are started again, and the run goes on.

ray job submit -- python examples/clusters/ray_train.py RUN.toml /shared/run --workers 16 --gpus
"""

import argparse
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(run: dict[str, str]) -> None:
    """Train as one rank of the process group that Ray has made."""
    from meshwright import api
    from meshwright.spec import load

    api.train(load(Path(run["file"])), out=Path(run["out"]), resume="auto")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "file", type=Path, help="run file, whose layout has as many ranks as there are workers"
    )
    parser.add_argument("out", type=Path, help="the run's folder, which all workers have")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="each worker has a GPU")
    parser.add_argument("--failures", type=int, default=3, help="lost workers that the run outlives")
    given = parser.parse_args()
    TorchTrainer(
        train,
        train_loop_config={"file": str(given.file.resolve()), "out": str(given.out.resolve())},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=given.failures)),
    ).fit()
