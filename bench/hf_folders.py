"""HF folders of Llamas of any size for benchmarks, with numbers or with holes in their place."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from meshwright.exchange.hf_config import write_hf_config
from meshwright.exchange.hf_state_dict import hf_tensors
from meshwright.exchange.stored_weights import tensor_shapes
from meshwright.exchange.tensor_store import DTYPE_NAMES
from meshwright.spec import ModelSpec

SHAPES: dict[str, dict[str, int]] = {
    "300MB": {"layers": 8, "hidden": 1024, "ffn": 4096, "heads": 8, "kv_heads": 2, "vocab_size": 16384},
    "2B": {"layers": 18, "hidden": 2048, "ffn": 16384, "heads": 8, "kv_heads": 1, "vocab_size": 65536},
    "3B": {"layers": 28, "hidden": 3072, "ffn": 8192, "heads": 24, "kv_heads": 8, "vocab_size": 128256},
    "7B": {"layers": 32, "hidden": 4096, "ffn": 11008, "heads": 32, "kv_heads": 32, "vocab_size": 32000},
    "70B": {"layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8, "vocab_size": 128256},
}
"""By bytes in bf16 or parameters: 2B has the width and depth of Gemma 2B, 3B is Llama 3.2 with a head of its
own, 7B Llama 2's, 70B Llama 3's."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_DRAWN = 2**24
"""Random numbers that are drawn once, and follow each other again and again in files."""


def write_folder(
    folder: Path, sizes: dict[str, int], dtype: torch.dtype, *, holes: bool = False
) -> dict[str, int]:
    """Write the HF folder of a Llama, a file for each tensor; return its bytes, and the largest tensor's.

    With `holes` files have headers alone, and are as long as if numbers followed, which read as zeros.
    """
    model = ModelSpec.model_validate({"preset": None, "norm_eps": 1e-5, **sizes})
    shapes, weight_map, listed = tensor_shapes(model), {}, []
    drawn = (0.02 * torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0))).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    pieces = list(hf_tensors(model))
    for number, piece in enumerate(pieces, 1):
        name = f"model-{number:05d}-of-{len(pieces):05d}.safetensors"
        shape = tuple(piece.shape(shapes))
        listed.append(_write(folder / name, piece.hf, shape, dtype, None if holes else drawn))
        weight_map[piece.hf] = name
    index = {"metadata": {"total_size": sum(listed)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = write_hf_config(model, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config))
    return {"bytes": sum(listed), "largest_tensor": max(listed)}


def _write(
    path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, drawn: torch.Tensor | None
) -> int:
    """Write a file of one tensor, of the numbers `drawn` again and again or of a hole; return its bytes."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    entry = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [0, size]}
    header = json.dumps({name: entry}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        if drawn is None:
            file.truncate(file.tell() + size)
            return size
        for start in range(0, count, len(drawn)):
            file.write(drawn[: count - start].view(torch.uint8).numpy().data)
    return size
