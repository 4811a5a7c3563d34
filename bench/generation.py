"""Tokens a second of greedy generation beside transformers' `generate`, in turns, on this machine.

    python bench/generation.py [--preset small] [--prompt 64] [--new 64] [--batch 1,16] [--rounds 5]
        [--dtype float32] [--run RUN --text FILE] [--lookup N]

One model, exported and opened by both, on one device: a preset with random weights and prompts of random
tokens, or that of a run, which continues parts of a text. Each round takes both in turns, on prompts of its
own. Printed is a JSON object for each batch: the median tokens a second of both, the median ratio of seconds
and that of seconds of processors, which other programs of a busy machine change less, the share of
continuations that are the same, and how many tokens a row gets in a turn of ours. With `--lookup` both read
ahead; transformers does so for one prompt only.

With LLAMA_CPP, the folder of llama.cpp's programs, its llama-batched-bench takes turns, too, on the GGUF file
of the same weights in the same format and on that in q8_0: `llama.cpp` has its tokens a second and the ratio
of seconds of each. Its keys and values are in fp16, as is usual there, and it takes as many threads as torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshwright.data.tokenizer import Tokenizer, byte_tokenizer
from meshwright.exchange.gguf_file import export_gguf
from meshwright.exchange.hf import export_hf, load_hf
from meshwright.infer import generate
from meshwright.infer.forward import StageForward
from meshwright.infer.packed_linears import pack_linears
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import ModelSpec, load
from meshwright.weights.load import load_run


def seconds(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float, float]:
    """The result of a call, the seconds that it takes, and those of processors."""
    began = time.perf_counter(), time.process_time()
    found = run()
    return found, time.perf_counter() - began[0], time.process_time() - began[1]


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over rounds of how many times as long theirs took."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def prompts(run: Path, text: Path, batch: int, length: int) -> torch.Tensor:
    """Tokens (batch, length) of parts of a text that are as far from each other as they can be."""
    tokens = Tokenizer.open(run / "tokenizer.json").encode(text.read_text(encoding="utf-8"))
    step = (len(tokens) - length) // batch
    parts = [[int(token) for token in tokens[row * step :][:length]] for row in range(batch)]
    return torch.tensor(parts)


def llama_cpp_seconds(file: Path, prompt: int, new: int, batch: int) -> float:
    """Seconds that llama.cpp reads prompts for and continues them, without loading the file."""
    cells = str(batch * (prompt + new) + 64)
    words = ["-npp", str(prompt), "-ntg", str(new), "-npl", str(batch), "-c", cells, "-m", str(file)]
    program = Path(os.environ["LLAMA_CPP"]) / "llama-batched-bench"
    threads = str(torch.get_num_threads())
    command = [str(program), *words, "-t", threads, "-tb", threads, "--output-format", "jsonl"]
    for _ in range(20):  # its last lines are lost where it ends before the thread that prints them
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for line in told.splitlines():
            if line.startswith("{") and line.endswith("}"):
                row = json.loads(line)
                return float(row["t_pp"] + row["t_tg"])
    raise RuntimeError(f"{program} printed no row")


def gguf_files(
    folder: Path, spec: ModelSpec, tensors: dict[str, torch.Tensor], dtype: str, run: Path | None
) -> dict[str, Path]:
    """The GGUF files of a model by format of the weights; none without LLAMA_CPP."""
    if "LLAMA_CPP" not in os.environ:
        return {}
    byte_tokenizer().save(folder)
    tokenizer = (run or folder) / "tokenizer.json"
    files = {kind: folder / f"{kind}.gguf" for kind in (dtype, "q8_0")}
    for kind, file in files.items():
        export_gguf(file, spec, tensors, tokenizer, kind)
    return files


def all_prompts(options: argparse.Namespace, spec: ModelSpec, count: int) -> torch.Tensor:
    """Tokens (count, options.prompt): random ones, or parts of the text that goes with a run."""
    if options.run is not None:
        return prompts(options.run, options.text, count, options.prompt)
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, spec.vocab_size, (count, options.prompt), generator=draw)


def compared(
    options: argparse.Namespace,
    spec: ModelSpec,
    ours: Decoder,
    theirs: PreTrainedModel,
    files: Mapping[str, Path],
    batch: int,
) -> dict[str, object]:
    """Speeds of the programs on `batch` prompts at a time, in turns, and how many answers are the same."""
    count = batch * options.rounds
    every = all_prompts(options, spec, count)
    length = {"min_new_tokens": options.new, "max_new_tokens": options.new}
    if options.lookup:
        length["prompt_lookup_num_tokens"] = options.lookup
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "meshwright": lambda tokens: generate(ours, tokens, options.new, lookup=options.lookup),
        "transformers": lambda tokens, length=length: theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0, **length
        )[:, options.prompt :],
    }
    took: dict[str, list[float]] = {name: [] for name in runs}
    llama: dict[str, list[float]] = {kind: [] for kind in files}
    busy: dict[str, list[float]] = {name: [] for name in runs}
    same, turns, turn = 0, 0, StageForward.__call__
    for tokens in (every[:batch], *every.split(batch)):  # the first also warms both up
        found = []
        for name, run in runs.items():
            with patch.object(StageForward, "__call__", autospec=True, side_effect=turn) as called:
                new, wall, processors = seconds(partial(run, tokens))
            found.append(new)
            took[name].append(wall)
            busy[name].append(processors)
            turns += called.call_count
        for kind, file in files.items():
            llama[kind].append(llama_cpp_seconds(file, options.prompt, options.new, batch))
        same += int((found[0] == found[1]).all(1).sum())
    ours_took, theirs_took = (times[1:] for times in took.values())
    row: dict[str, object] = {
        "batch": batch,
        "tokens_per_second": [
            batch * options.new / statistics.median(times) for times in (ours_took, theirs_took)
        ],
        "ratio": median_ratio(ours_took, theirs_took),
        "cpu_ratio": median_ratio(*(times[1:] for times in busy.values())),
        "same": same / (batch + count),
        "tokens_per_turn": options.new * (1 + options.rounds) / turns,
    }
    row["llama.cpp"] = {
        kind: [
            batch * options.new / statistics.median(times[1:]),
            median_ratio(ours_took, times[1:]),
        ]
        for kind, times in llama.items()
    }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each continuation")
    parser.add_argument("--batch", default="1,16", help="prompts at a time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--run", type=Path, help="the folder of a run, in place of a preset")
    parser.add_argument("--text", type=Path, help="what the prompts are parts of, with --run")
    parser.add_argument("--lookup", type=int, default=0, help="most tokens that a turn reads ahead")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if options.run is None:
        spec = load(None, [("model.preset", options.preset)]).model
        decoder = init_whole_(Decoder(spec), seed=0)
    else:
        decoder = load_run(options.run)
        spec = decoder.spec
    with TemporaryDirectory() as folder:
        export_hf(Path(folder) / "hf", spec, decoder.tensors(), dtype=dtype)
        ours = pack_linears(load_hf(Path(folder) / "hf", dtype))
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", dtype=dtype).eval()
        files = gguf_files(Path(folder), spec, decoder.tensors(), options.dtype, options.run)
        for batch in map(int, options.batch.split(",")):
            print(json.dumps(compared(options, spec, ours, theirs, files, batch)), flush=True)


if __name__ == "__main__":
    main()
