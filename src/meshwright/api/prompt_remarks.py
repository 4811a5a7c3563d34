"""Warnings about prompts: tokens that surprise, and settings of a model's folder that are not applied."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.records import show

if TYPE_CHECKING:
    from meshwright.data.tokenizer import Tokenizer

NOT_APPLIED: dict[str, Any] = {
    "bad_words_ids": None, "begin_suppress_tokens": None, "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "num_beams": 1,
    "repetition_penalty": 1.0, "sequence_bias": None, "stop_strings": None, "suppress_tokens": None,
}  # fmt: skip
"""Keys of generation_config.json that change which tokens are likeliest, or where a text ends, and are not
applied, with the value of each that changes nothing; so do null and an empty list."""


def warn_of_prompts(
    run: Path,
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    given: Sequence[list[int]],
    special_tokens: str,
) -> None:
    """Warn of what may surprise in the tokens of prompts."""
    from meshwright.data.tokenize import literals_sentence, tell_remarks

    if not (run / "run.json").is_file():  # import has told those of a run
        tell_remarks(tokenizer)
    if settings := _not_applied(run):
        asked = ", ".join(f"{name} {show(value)}" for name, value in settings.items())
        warnings.warn(
            f"generate: {run / 'generation_config.json'} asks for {asked}, which is not applied; "
            "transformers would choose other tokens",
            stacklevel=3,
        )
    before, after = tokenizer.tokens.before, tokenizer.tokens.after
    if tokenizer.end_id not in (stops := tokenizer.tokens.stop_ids):
        warnings.warn(
            f"generate: {run} ends generations at {tokenizer.decode(stops) or stops}, by its configs, and "
            f"not at {tokenizer.decode([tokenizer.end_id])}, which ends documents",
            stacklevel=3,
        )
    for number in stops:
        if number >= tokenizer.vocab_size:
            warnings.warn(
                f"generate: {run} ends generations at eos_token_id {number}, which none of its tokenizer's "
                f"{tokenizer.vocab_size} tokens has, so no generation ever ends there",
                stacklevel=3,
            )
    if special_tokens == "text":
        split = [literal for row in rows for literal in tokenizer.literals.of(row["prompt"])]
        if split:
            said = literals_sentence(len(split), split[0], "--special-tokens read")
            warnings.warn(f"generate: {said}", stacklevel=3)
    elif special_tokens == "read":
        twice = sum(1 for ids in given if before and tuple(ids[: len(before)]) == before)
        if twice:
            warnings.warn(
                f"generate: {twice:,} of {len(rows):,} prompts begin with {tokenizer.decode(before)}, and "
                "the tokenizer puts that before them once more; --special-tokens rendered puts nothing there",
                stacklevel=3,
            )
        if after:
            warnings.warn(
                f"generate: the tokenizer puts {tokenizer.decode(after)} behind each prompt, as in "
                "transformers; --special-tokens rendered puts nothing there",
                stacklevel=3,
            )


def _not_applied(run: Path) -> dict[str, Any]:
    """Return what of a generation_config.json would change a continuation."""
    path = run / "generation_config.json"
    given = read_json_object(path, "generate") if path.is_file() else {}
    return {
        name: given[name]
        for name, neutral in NOT_APPLIED.items()
        if given.get(name) not in (None, [], "", neutral)
    }
