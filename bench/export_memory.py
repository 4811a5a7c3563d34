"""Peak memory of exporting a run beside the size of its weights: a parameter at a time, whatever the layout.

    python bench/export_memory.py [--model.preset llama2-7b ...]

Makes a run with random weights, exports it as an HF folder and as a GGUF file in processes of their own, and
prints one JSON object: bytes of the weights and of the largest parameter, and the peak of each process less
that of one that only loads the program.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import starmap
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.checkpoint.weights import whole_part
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.exchange.hf import tensor_shapes
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec.load import load
from meshwright.weights.load import write_run

EXPORT = """
import resource, sys
from pathlib import Path
from meshwright import api
from meshwright.weights import exports
if len(sys.argv) > 1:
    api.export(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak(*words: object) -> int:
    """Bytes that a process takes which exports, or without words only loads the program."""
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, *map(str, words)], stdout=subprocess.PIPE, text=True, check=True
    )
    return int(done.stdout)


def main() -> None:
    flags = [word.removeprefix("--") for word in sys.argv[1:]]
    model = load(None, list(zip(flags[::2], flags[1::2], strict=True))).model
    sizes = [4 * prod(shape) for shape in tensor_shapes(model).values()]
    with TemporaryDirectory() as name:
        folder = Path(name)
        byte_tokenizer().save(folder)
        tensors = init_whole_(Decoder(model), 0).tensors()
        write_run(
            folder / "run", model, starmap(whole_part, tensors.items()), {"seq_len": 64},
            sorted(folder.glob("*.json")), folder, {"merged": []}, False,
        )  # fmt: skip
        del tensors
        loaded = peak()
        found = {
            kind: peak(folder / "run", folder / target, dtype) - loaded
            for kind, target, dtype in (
                ("HF folder, float32", "hf32", "float32"),
                ("HF folder, bfloat16", "hf16", "bfloat16"),
                ("GGUF, q8_0", "x.gguf", "q8_0"),
            )
        }
    print(json.dumps({"weights": sum(sizes), "largest parameter": max(sizes), "loaded": loaded, **found}))


if __name__ == "__main__":
    main()
