"""Read checkpoints that other programs write with their own code, and compare logits with theirs.

`python tests/interop/foreign_checkpoints.py [NAME ...]` makes an environment with the programs in `--env`
(default .interop), unless `--python` names one that has them, lets each write a small model there
(`foreign_writers.py`), opens it as `meshwright import` does, and prints the largest difference of a logit.
Exits with 1 if one is above 1e-4 of the largest logit, or if a program failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import torch
from foreign_writers import WRITERS

from meshwright.checkpoint.weights import fill
from meshwright.exchange.foreign.source import open_source
from meshwright.model.decoder import Decoder

PACKAGES = (
    "torch==2.13.0", "transformers==5.23.0", "peft==0.21.2", "litgpt==0.5.13", "megatron-core==0.16.1",
    "torchtitan==0.3.0", "deepspeed==0.19.8", "accelerate", "einops", "tyro", "lightning", "jsonargparse",
    "setuptools", "wheel",
)  # fmt: skip
MOST = 1e-4
"""Largest difference of a logit, as a share of the largest logit."""


def environment(folder: Path) -> Path:
    """Return the Python of an environment with the programs, made if it is not there."""
    python = folder / "bin" / "python"
    if not python.is_file():
        venv.create(folder, with_pip=True)
        command = [str(python), "-m", "pip", "install", "-q", *PACKAGES]
        subprocess.run(command, check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    return python


def compared(name: str, python: Path, folder: Path) -> tuple[str, float]:
    """Let a program write its checkpoint; return the family that was read, and the difference of logits."""
    writer = Path(__file__).with_name("foreign_writers.py")
    folder.mkdir()
    with (folder / "log").open("w") as log:
        subprocess.run([str(python), str(writer), name, str(folder)], check=True, stdout=log, stderr=log,
                       timeout=900)  # fmt: skip
    given = folder / "config.json"
    source = open_source(folder / "checkpoint", config=folder if given.is_file() else None)
    decoder = Decoder(source.model).eval()
    fill(decoder.tensors(), source.weights)
    wanted = torch.load(folder / "logits.pt", weights_only=True)
    with torch.no_grad():
        logits = decoder(wanted["tokens"])
    difference = (logits - wanted["logits"]).abs().max() / wanted["logits"].abs().max()
    return source.model.family, float(difference)


def main() -> int:
    """Compare the programs that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(WRITERS))
    parser.add_argument("--env", type=Path, default=Path(".interop"))
    parser.add_argument("--python", type=Path, help="a Python that has the programs")
    given = parser.parse_args()
    python = given.python or environment(given.env)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.names or WRITERS:
            try:
                family, difference = compared(name, python, Path(scratch) / name)
            except subprocess.SubprocessError as error:
                log = (Path(scratch) / name / "log").read_text(errors="replace").splitlines()
                print(f"{name:18} failed: {error}", *log[-8:], sep="\n    ", flush=True)
                failed += 1
                continue
            equal = difference <= MOST
            failed += not equal
            print(f"{name:18} {family:10} {difference:.1e} {'equal' if equal else 'DIFFERS'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
