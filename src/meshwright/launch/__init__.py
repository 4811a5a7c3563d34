"""Launching of ranks on this machine, and the place of each rank in the world."""

from meshwright.launch.failure import Outcome
from meshwright.launch.local import run_ranks

__all__ = ["Outcome", "run_ranks"]
