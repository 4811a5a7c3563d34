"""The schedulers by their names."""

from __future__ import annotations

from meshwright.submit.kubernetes import Kubernetes
from meshwright.submit.ray import Ray
from meshwright.submit.scheduler import Scheduler
from meshwright.submit.skypilot import SkyPilot
from meshwright.submit.slurm import Slurm
from meshwright.submit.ssh import Ssh

SCHEDULERS: dict[str, Scheduler] = {
    "slurm": Slurm(),
    "kubernetes": Kubernetes(),
    "ray": Ray(),
    "skypilot": SkyPilot(),
    "ssh": Ssh(),
}
"""The names that `--on` takes."""
