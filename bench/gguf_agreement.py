"""How far llama.cpp's greedy continuations of a run's GGUF files agree with `meshwright generate`.

    python bench/gguf_agreement.py RUN [--prompts 20] [--new 64]

It needs the package llama-cpp-python. Prompts are from the middle of files of Python's standard library.
Printed is a JSON object for each file and format of keys and values: its bytes, how many prompts become the
same tokens and how many continuations are the same, and the mean share of characters before the first
difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright import api
from meshwright.data.tokenizer import Tokenizer

FILES = (("float32", "f32"), ("float32", "f16"), ("bfloat16", "f32"), ("q8_0", "f32"), ("q4_k_m", "f32"))
"""Formats of weights, and of keys and values."""


def quantised(file: Path, target: Path) -> None:
    """Write a q4_k_m file out of one in float32, by llama.cpp."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    assert llama_cpp.llama_model_quantize(str(file).encode(), str(target).encode(), options) == 0


def continuation(model: Any, prompt: list[int], new: int, tokenizer: Tokenizer) -> str:
    """Return the text of the likeliest tokens after a prompt's."""
    model.reset()
    model.eval(prompt)
    found: list[int] = []
    while len(found) < new and (token := int(model.scores[model.n_tokens - 1].argmax())) != tokenizer.end_id:
        found.append(token)
        model.eval([token])
    return tokenizer.decode([*prompt, *found])[len(tokenizer.decode(prompt)) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new", type=int, default=64)
    options = parser.parse_args()
    import llama_cpp

    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::8][: options.prompts]
    texts = [source.read_text(encoding="utf-8", errors="ignore") for source in sources]
    prompts = [text[len(text) // 2 :][:200] for text in texts]
    tokenizer = Tokenizer.open(options.run / "tokenizer.json")
    ids = [list(map(int, tokenizer.prompt(tokenizer.encode(prompt)))) for prompt in prompts]
    ours = api.generate(options.run, prompts, max_new_tokens=options.new)
    with TemporaryDirectory() as folder:
        for dtype, cache in FILES:
            file = Path(folder) / f"{dtype}.gguf"
            if dtype == "q4_k_m":
                quantised(Path(folder) / "float32.gguf", file)
            elif not file.exists():
                api.export(options.run, file, dtype)
            kind = {"f32": llama_cpp.GGML_TYPE_F32, "f16": llama_cpp.GGML_TYPE_F16}[cache]
            model = llama_cpp.Llama(
                str(file), n_ctx=512, n_threads=1, type_k=kind, type_v=kind, logits_all=True, verbose=False
            )
            read = [model.tokenize(prompt.encode(), add_bos=True) for prompt in prompts]
            shares = []
            for prompt, text in zip(ids, ours, strict=True):
                theirs = continuation(model, prompt, options.new, tokenizer)
                alike = itertools.takewhile(bool, map(str.__eq__, theirs, text))
                shares.append(sum(alike) / max(1, len(theirs), len(text)))
            row = {"weights": dtype, "keys_and_values": cache, "bytes": file.stat().st_size, "of": len(ours)}
            row |= {"same_tokens": sum(a == b for a, b in zip(read, ids, strict=True))}
            row |= {"same_continuations": sum(share == 1 for share in shares)}
            print(json.dumps({**row, "share": round(statistics.fmean(shares), 3)}), flush=True)


if __name__ == "__main__":
    main()
