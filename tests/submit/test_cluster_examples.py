"""Files in examples/clusters are what `meshwright launch --dry-run` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright import api

FOLDER = Path(__file__).parents[2] / "examples/clusters"
RUN = 'model = { preset = "llama3-8b" }\nlayout = { dp = 16, zero = 3 }\n'
"""A run on two nodes of eight GPUs."""
IMAGE = "registry.example.org/meshwright:0.7"
VOLUME = [("shared", "/shared")]
EXAMPLES: dict[str, dict[str, Any]] = {
    "slurm.sbatch": {"on": "slurm"},
    "slurm-torchrun.sbatch": {"on": "slurm", "ranks_by": "torchrun"},
    "slurm-nodes.sbatch": {"on": "slurm", "nodes": "1:2"},
    "slurm-sweep.sbatch": {
        "on": "slurm", "sweep": [("train.lr", ("1e-4", "3e-4")), ("train.seed", ("1", "2"))], "at_once": 2,
    },
    "slurm-container.sbatch": {
        "on": "slurm", "image": IMAGE, "volume": [("/data", "/data")], "env": [("NCCL_DEBUG", "WARN")],
        "option": ["partition=gpu"],
    },
    "kubernetes-trainjob.yaml": {
        "on": "kubernetes", "image": IMAGE, "volume": VOLUME, "service_account": "trainer",
    },
    "kubernetes-jobset.yaml": {"on": "kubernetes", "kind": "jobset", "image": IMAGE, "volume": VOLUME},
    "ray_train.py": {"on": "ray"},
    "skypilot.yaml": {"on": "skypilot", "accelerator": "H100", "volume": VOLUME},
    "ssh.sh": {"on": "ssh", "hosts": ("node1", "node2")},
}  # fmt: skip


def rendered(name: str, folder: Path) -> str:
    """Return what `launch --dry-run` prints for an example, with a run file of a folder in its words."""
    run = folder / "run.toml"
    run.write_text(RUN, encoding="utf-8")
    given = {"name": "meshwright", "out": Path("/shared/run"), **EXAMPLES[name], "dry_run": True}
    text = str(api.launch(run, **given)["file"])
    return text.replace(str(Path.cwd()), "/shared").replace(str(folder), "/shared")


def test_every_file_is_an_example() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {*EXAMPLES}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_nodes_of_any_job_are_examined_unless_it_says_otherwise(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")

    def submitted(**more: Any) -> str:
        given = {"name": "meshwright", "out": Path("/shared/run"), **EXAMPLES[name], **more, "dry_run": True}
        found = api.launch(tmp_path / "run.toml", **given)
        return str(found["file"] + str(found["commands"]))

    default, chosen = submitted(), submitted(no_doctor=True)
    if name == "ray_train.py":  # a script for any run, whose words say it
        assert "'--no-doctor'" in chosen and "'--no-doctor'" not in default
    else:
        assert "--doctor" in default and "doctor" not in chosen


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_a_dry_run_prints(name: str, tmp_path: Path) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == rendered(name, tmp_path)
