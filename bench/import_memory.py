"""Memory that `import` takes: the peak of a process above what it holds once its modules are imported.

    python bench/import_memory.py [--shape 300MB 2B] [--dtype bf16]

For each shape an HF folder of random numbers is written, a tensor at a time, and imported by a process of its
own. The peak is the resident memory that Linux notes (VmHWM). One JSON object a shape: bytes of the folder,
of its largest tensor, and of the peak above the start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_folders import DTYPES, SHAPES, write_folder

IMPORT = """
import json, sys
from pathlib import Path
from meshwright import api
import meshwright.weights.load

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

before = memory("VmRSS")
api.import_hf(Path(sys.argv[1]), Path(sys.argv[2]))
print(json.dumps({"before": before, "above": memory("VmHWM") - before}))
"""


def measured(folder: Path, out: Path) -> dict[str, int]:
    """Import a folder in a process of its own: its bytes `before`, and the peak `above` these."""
    words = [sys.executable, "-c", IMPORT, str(folder), str(out)]
    # Without it glibc keeps some freed tensors, more or fewer of them from run to run.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a JSON object for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["300MB", "2B"])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    options = parser.parse_args()
    for name in options.shape:
        with TemporaryDirectory() as scratch:
            folder = Path(scratch) / "hf"
            row: dict[str, Any] = {"shape": name, **write_folder(folder, SHAPES[name], DTYPES[options.dtype])}
            print(json.dumps(row | measured(folder, Path(scratch) / "run")), flush=True)


if __name__ == "__main__":
    main()
