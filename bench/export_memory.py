"""Peak memory of writing a model beside the size of its weights: a parameter at a time, whatever the layout.

    python bench/export_memory.py [--model.preset llama2-7b ...]

Makes a run with random weights, exports it as an HF folder, as a directory of torch.distributed.checkpoint
and as a GGUF file, and quantises the HF folder, to nearest and by GPTQ on 2,048 tokens, in processes of their
own. The first JSON object has bytes of the weights in fp32, of the largest parameter and of a block; each
other one the peak of a process (VmHWM) less that of one that only loads the program.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import starmap
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright import api
from meshwright.checkpoint.weights import whole_part
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.exchange.hf import tensor_shapes
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec.load import load
from meshwright.weights import exports, quantise
from meshwright.weights.load import write_run

_LOADED = exports, quantise
"""Modules that a way imports, so that they are in the memory of a program that does nothing."""
TOKENS = 2048
WAYS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "HF folder, float32": lambda it: api.export(it / "run", it / "hf", "float32"),
    "HF folder, bfloat16": lambda it: api.export(it / "run", it / "hf16", "bfloat16"),
    "torch.distributed.checkpoint, float32": lambda it: api.export(
        it / "run", it / "dcp", "float32", format="dcp"
    ),
    "GGUF, q8_0": lambda it: api.export(it / "run", it / "x.gguf", "q8_0"),
    "int4 to nearest, of an HF folder": lambda it: api.quantise(it / "hf16", it / "nearest", "int4"),
    "int4 by GPTQ, of an HF folder": lambda it: api.quantise(
        it / "hf16", it / "gptq", "int4", algorithm="gptq", calibration=it / "text",
        calibration_tokens=TOKENS,
    ),
}  # fmt: skip
"""Functions of a folder with a run and a text of calibration, by name."""


def peak(way: str, folder: Path) -> int:
    """Bytes that a process takes which does one of `WAYS` in a folder."""
    call = f"import export_memory as it; it.measure({way!r}, {str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True
    )
    return int(done.stdout.split()[-1])


def measure(way: str, folder: str) -> None:
    """Do one of `WAYS`, and print the peak of this process since it began, which `ru_maxrss` is not: a
    process inherits that of the one that started it."""
    WAYS[way](Path(folder))
    (line,) = (row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM:"))
    print(int(line.split()[1]) * 1024)


def main() -> None:
    """Print a JSON object for the model, and one for each way."""
    flags = [word.removeprefix("--") for word in sys.argv[1:]]
    model = load(None, list(zip(flags[::2], flags[1::2], strict=True))).model
    sizes = {name: 4 * prod(shape) for name, shape in tensor_shapes(model).items()}
    with TemporaryDirectory() as name:
        folder = Path(name)
        byte_tokenizer().save(folder)
        tensors = init_whole_(Decoder(model), 0).tensors()
        write_run(
            folder / "run", model, starmap(whole_part, tensors.items()), {"seq_len": 64},
            sorted(folder.glob("*.json")), folder, {"merged": []}, False,
        )  # fmt: skip
        del tensors
        (folder / "text").write_text("the cat sat on the mat. " * (TOKENS // 16))
        loaded = peak("nothing", folder)
        block = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
        about = {"weights": sum(sizes.values()), "largest parameter": max(sizes.values()), "block": block}
        print(json.dumps(about | {"loaded": loaded}), flush=True)
        for way in WAYS:
            if way != "nothing":
                print(json.dumps({way: peak(way, folder) - loaded}), flush=True)


if __name__ == "__main__":
    main()
