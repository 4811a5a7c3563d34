"""Where a run runs: the ranks of this machine, and what a rank knows of its place among them."""

from meshwright.launch.failure import Outcome
from meshwright.launch.local import run_ranks

__all__ = ["Outcome", "run_ranks"]
