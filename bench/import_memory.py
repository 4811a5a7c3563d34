"""Memory that `import` takes: the peak of a process above what it holds once its modules are imported.

    python bench/import_memory.py [--shape 300MB 2B] [--dtype bf16]

For each shape an HF folder with weights of one constant is written, a tensor at a time, and imported by a
process of its own. The peak is the resident memory that Linux notes (VmHWM). One JSON object a shape: bytes
of the folder, of its largest tensor, and of the peak above the start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from meshwright.exchange.hf_config import write_hf_config
from meshwright.exchange.hf_state_dict import hf_tensors
from meshwright.exchange.stored_weights import tensor_shapes
from meshwright.spec import ModelSpec

SHAPES: dict[str, dict[str, int]] = {
    "300MB": {"layers": 8, "hidden": 1024, "ffn": 4096, "heads": 8, "kv_heads": 2, "vocab_size": 16384},
    "2B": {"layers": 18, "hidden": 2048, "ffn": 16384, "heads": 8, "kv_heads": 1, "vocab_size": 65536},
}
"""Llamas in bf16: of 300 MB, and with the width and depth of Gemma 2B."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
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


def write_folder(folder: Path, sizes: dict[str, int], dtype: torch.dtype) -> dict[str, int]:
    """Write the HF folder of a Llama, a file for each tensor; return its bytes, and the largest tensor's."""
    model = ModelSpec.model_validate({"preset": None, "norm_eps": 1e-5, **sizes})
    shapes, weight_map, listed = tensor_shapes(model), {}, []
    pieces = list(hf_tensors(model))
    for number, piece in enumerate(pieces, 1):
        tensor = torch.full(piece.shape(shapes), 0.01, dtype=dtype)
        name = f"model-{number:05d}-of-{len(pieces):05d}.safetensors"
        save_file({piece.hf: tensor}, folder / name)
        weight_map[piece.hf] = name
        listed.append(tensor.nbytes)
    index = {"metadata": {"total_size": sum(listed)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = write_hf_config(model, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config))
    return {"bytes": sum(listed), "largest_tensor": max(listed)}


def measured(folder: Path, out: Path) -> dict[str, int]:
    """Import a folder in a process of its own: its bytes `before`, and the peak `above` these."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, str(folder), str(out)], capture_output=True, text=True, check=True
    )
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a JSON object for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    options = parser.parse_args()
    for name in options.shape:
        with TemporaryDirectory() as scratch:
            folder = Path(scratch) / "hf"
            folder.mkdir()
            row: dict[str, Any] = {"shape": name, **write_folder(folder, SHAPES[name], DTYPES[options.dtype])}
            print(json.dumps(row | measured(folder, Path(scratch) / "run")), flush=True)


if __name__ == "__main__":
    main()
