"""The process of a part: `python -m gpu_day.worker TASK`, where TASK is a `Task` as JSON."""

from __future__ import annotations

import importlib
import json
import sys

from gpu_day.devices import prepare
from gpu_day.results import Task, Work
from meshwright.rank.env import worker


def main() -> None:
    """Do the part, as one process or as one of its ranks, which this process starts."""
    task = Task(**json.loads(sys.argv[1]))
    place = worker()
    if task.ranks > 1 and task.device == "cuda" and place is None:
        from meshwright.launch.supervisor import run_ranks

        outcome = run_ranks(sys.argv[1:], task.ranks, module="gpu_day.worker")
        if outcome.code:
            sys.exit(f"{outcome.details}\n{outcome.sentence}")
        return
    work = Work(task, writes=place is None or place.rank == 0)
    prepare(work)  # before torch is imported
    importlib.import_module(f"gpu_day.{task.kind}").run(work)


if __name__ == "__main__":
    main()
