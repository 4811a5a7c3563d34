"""Bits per byte, size and speed of a run's model by recipe, and whether transformers writes the same tokens.

    python bench/quantisation.py RUN [--group-size 64] [--eval-tokens N] [--new 64] [--prompts 8]

Prints the tables of `meshwright quantise RUN --compare --sensitivity linear` in Markdown. Then each recipe's
folder is opened by transformers in fp32, and the greedy tokens of both that are the same are counted, for
prompts of held-out text. Needs compressed-tensors and transformers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM

from meshwright import api
from meshwright.data.corpus import open_corpus
from meshwright.exchange.hf import load_hf
from meshwright.infer import generate
from meshwright.infer.quantisation_table import HeldOutBatches
from meshwright.spec import load
from meshwright.spec.quantisation import RECIPES

PROMPT = 32
"""Tokens of each prompt."""


def show(recipe: str, row: dict[str, float]) -> None:
    """Print one row of the table of recipes."""
    sizes = f"{row['computed_bytes'] / 1e6:.2f} | {row['file_bytes'] / 1e6:.2f}"
    cost = f"{row['bits_per_byte']:.4f} | {row['change_percent']:+.2f}%"
    print(f"| {recipe} | {cost} | {sizes} | {row['tokens_per_second']:.0f} |", flush=True)


def same_tokens(folder: Path, prompts: torch.Tensor, new: int) -> tuple[int, int]:
    """Greedy tokens of ours that transformers chooses, too, of a folder in fp32; and all of them."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    length = {"min_new_tokens": new, "max_new_tokens": new}
    mask = torch.ones_like(prompts)
    found = theirs.generate(prompts, attention_mask=mask, do_sample=False, pad_token_id=0, **length)
    ours = generate(load_hf(folder, torch.float32), prompts, new)
    return int((found[:, prompts.shape[1] :] == ours).sum()), ours.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path)
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--eval-tokens", type=int)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8)
    options = parser.parse_args()
    print("| recipe | bits per byte | change | MB | MB on disk | tokens/s |\n" + "| --- " * 6 + "|")
    found = api.compare_quantisation(
        options.run, group_size=options.group_size, eval_tokens=options.eval_tokens, sensitivity="linear",
        told=lambda _, row: show(row["recipe"], row),
    )  # fmt: skip
    print(f"\n| only this layer in {found['recipe']} | change |\n| --- | --- |")
    for row in found["sensitivity"]:
        print(f"| {row['layer']} | {row['change_percent']:+.3f}% |")
    spec = load(options.run)
    held_out = HeldOutBatches.read(open_corpus(spec), spec, None).batches[0].tokens
    prompts = held_out[: options.prompts, :PROMPT]
    print("\n| recipe | tokens | the same in transformers |\n| --- | --- | --- |")
    with TemporaryDirectory() as folder:
        for recipe in RECIPES:
            at = Path(folder) / recipe
            size = options.group_size if recipe == "int4" else None
            api.quantise(options.run, at, recipe, group_size=size)
            same, total = same_tokens(at, prompts, options.new)
            print(f"| {recipe} | {total} | {same} |", flush=True)


if __name__ == "__main__":
    main()
