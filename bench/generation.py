"""Tokens a second of greedy generation beside transformers' `generate`, in turns, on this machine.

    python bench/generation.py [--preset small] [--prompt 64] [--new 64] [--batch 1,16] [--rounds 5]
        [--dtype float32]

One model with random weights, exported and opened by both, on one device. Each round takes both in
turns; printed is a JSON object for each batch: the median tokens a second of each, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM

from meshwright.checkpoint.hf import export_hf, load_hf
from meshwright.infer import generate
from meshwright.infer.packed_linears import pack_linears
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import load


def seconds(run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each continuation")
    parser.add_argument("--batch", default="1,16", help="prompts at a time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    spec = load(None, [("model.preset", options.preset)]).model
    with TemporaryDirectory() as folder:
        export_hf(Path(folder) / "hf", spec, init_whole_(Decoder(spec), seed=0).tensors(), dtype=dtype)
        ours = pack_linears(load_hf(Path(folder) / "hf", dtype))
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", dtype=dtype).eval()
    for batch in map(int, options.batch.split(",")):
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, spec.vocab_size, (batch, options.prompt), generator=draw)
        length = {"min_new_tokens": options.new, "max_new_tokens": options.new}
        runs: dict[str, Callable[[], torch.Tensor]] = {
            "meshwright": lambda tokens=tokens: generate(ours, tokens, options.new),
            "transformers": lambda tokens=tokens, length=length: theirs.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0, **length
            )[:, options.prompt :],
        }
        found = {name: run() for name, run in runs.items()}  # also warms both up
        took: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, run in runs.items():
                took[name].append(seconds(run))
        rates = {name: batch * options.new / statistics.median(times) for name, times in took.items()}
        ratio = statistics.median(b / a for a, b in zip(*took.values(), strict=True))
        same = bool(torch.equal(found["meshwright"], found["transformers"]))
        print(
            json.dumps({"batch": batch, "tokens_per_second": rates, "ratio": ratio, "same": same}), flush=True
        )


if __name__ == "__main__":
    main()
