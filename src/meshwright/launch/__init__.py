"""Where a run runs: the ranks of this machine, and what a rank knows of its place among them."""

from meshwright.launch.env import Worker, worker
from meshwright.launch.failure import Outcome, RanksFailed
from meshwright.launch.local import run_ranks

__all__ = ["Outcome", "RanksFailed", "Worker", "run_ranks", "worker"]
