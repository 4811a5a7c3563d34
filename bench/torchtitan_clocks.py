"""The clocks of `dryrun --timeline` over torchtitan's own Llama 3.1 8B, beside the rates that it published.

    python bench/torchtitan_clocks.py [--cluster h100-96] [--out FILE]

The clocks know nothing of torchtitan: if they come near what it published, they may be believed about this
program. `bench/peers/torchtitan_step.py` says what runs: operators one by one, and with torchtitan's
compiler. It needs torchtitan's environment, `.peers/torchtitan`, which the first call makes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS = HERE / "peers"
ROWS = ("eager", "compiled")
"""The rows of torchtitan's table that are timed."""
PROGRAM = """
import json, sys
from meshwright.fake_cuda.process import FakeCudaProcess
from torchtitan_step import figures

with FakeCudaProcess() as process:
    print(json.dumps(process.call(figures, *sys.argv[1:])))
"""


def main() -> None:
    """Time the steps in torchtitan's environment, and print their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", default="h100-96", help="a cluster of eight devices")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    given = parser.parse_args()
    found = {row: json.loads(inside(given.cluster, row)) for row in ROWS}
    for row, figures in found.items():
        print(row)
        for key, value in figures.items():
            print(f"  {key}: {value}")
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def inside(*words: str) -> str:
    """The output of `PROGRAM` with torchtitan's interpreter."""
    sys.path.insert(0, str(PEERS))
    from run import python_of
    from sides import SIDES

    python = python_of(next(each for each in SIDES if each.name == "torchtitan"))
    if subprocess.run([python, "-c", "import pydantic, yaml, rich, jinja2, triton"], check=False).returncode:
        install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
        subprocess.run([*install, "pydantic", "pyyaml", "rich", "jinja2", "triton"], check=True)
    path = os.pathsep.join((str(ROOT / "src"), str(PEERS)))
    done = subprocess.run(
        [python, "-c", PROGRAM, *words],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    main()
