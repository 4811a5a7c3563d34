"""A run's folder whose weights are those of several models, merged."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.checkpoint.weights import whole_part
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec import UserError
from meshwright.spec.differences import as_in_file, differences
from meshwright.spec.hf.special_tokens import side_files
from meshwright.spec.weights import UNUSED
from meshwright.weights.load import write_run
from meshwright.weights.merge_methods import METHODS, WITH_BASE, WITH_DENSITY
from meshwright.weights.saved_weights import SavedWeights


@dataclass(frozen=True)
class Merge:
    """How models are merged: the method, a weight for each, and for some methods `density` and `seed`."""

    method: str
    weights: tuple[float, ...]
    density: float | None = None
    seed: int | None = None

    def check(self, models: int, base: bool) -> None:
        """Raise `UserError` unless this fits so many models, with or without a base."""
        method = self.method
        if models < 2 and method not in WITH_BASE:
            raise UserError(f"RUN: {method} merges two models or more, and one was given; give another")
        if models != 2 and method == "slerp":
            raise UserError(f"RUN: slerp merges two models, and {models} were given; give two, or linear")
        given = ",".join(f"{weight:g}" for weight in self.weights)
        if len(self.weights) != models:
            raise UserError(
                f"--weight: {given} is {len(self.weights)} for {models} models; give {models}, such as "
                + ",".join(["0.5"] * models)
            )
        shares = min(self.weights) >= 0 and sum(self.weights) > 0
        if method != "task_arithmetic" and not shares:
            raise UserError(
                f"--weight: {given} is not valid with {method}, which takes shares; give numbers of at least "
                "0, not all of them 0"
            )
        for flag, value, methods, example in (
            ("base", base or None, WITH_BASE, "the model that the others were trained from"),
            ("density", self.density, WITH_DENSITY, "the share of changes to keep, such as 0.2"),
        ):
            if value is None and method in methods:
                raise UserError(f"--{flag}: {method} needs {example}; give --{flag}")
            if value is not None and method not in methods:
                raise UserError(
                    f"--{flag}: has no effect with {method}; remove it, or give {' or '.join(methods)}"
                )
        if self.seed is not None and method != "dare_ties":
            raise UserError(f"--seed: {self.seed} has no effect with {method}; remove it, or give dare_ties")


def merge_runs(runs: Sequence[Path], names: Sequence[str], base: Path | None, how: Merge, out: Path) -> None:
    """Make the run's folder `out` with the merged weights of the newest checkpoints of `runs`.

    `names` say in messages and in run.json where the runs are from. Tokenizer and data are those of the
    first. Weights become float32, or float64 where the first run's are. Memory holds some copies of one
    parameter in float64. Raises `UserError` for models that differ.
    """
    opened = [SavedWeights(run) for run in runs]
    below = SavedWeights(base) if base is not None else None
    for other, name in zip(opened[1:], names[1:], strict=True):
        _check_alike(opened[0], other, names[0], name)
    if below is not None:
        _check_alike(opened[0], below, names[0], "--base")

    def merged(name: str) -> Tensor:
        values = [each.read(name).double() for each in opened]
        further: list[Any] = [below.read(name).double()] if below else []
        further += [how.density] if how.density is not None else []
        further += [how.seed or 0, name] if how.method == "dare_ties" else []
        return METHODS[how.method](values, how.weights, *further)

    parts = (whole_part(name, merged(name)) for name in opened[0].shapes)
    spec = opened[0].spec
    data = spec.data.model_dump(mode="json")
    origin = {"merge": {"of": list(names), **asdict(how)}}
    beside = side_files(runs[0], "merge")
    write_run(out, spec.model, parts, data, beside, runs[0], origin, opened[0].exact)


def _check_alike(first: SavedWeights, other: SavedWeights, name: str, others: str) -> None:
    """Raise `UserError` unless two models have one architecture, and one tokenizer if both have any."""
    one, two = (each.spec.model.model_dump(mode="json") for each in (first, other))
    for key, (a, b) in differences(one, two).items():
        if key not in UNUSED:
            raise UserError(
                f"{others}: its model.{key} is {as_in_file(b)}, that of {name} is {as_in_file(a)}; merge "
                "models of one architecture"
            )
    files = [each.run / "tokenizer.json" for each in (first, other)]
    if all(file.is_file() for file in files):
        _check_tokenizers(Tokenizer.content(files[0]), Tokenizer.content(files[1]), name, others)


def _check_tokenizers(first: Tokenizer, other: Tokenizer, name: str, others: str) -> None:
    """Raise `UserError` unless each id is of one token in both, and texts become the same tokens.

    What is put around a text, and special tokens' options, may differ, as between a base and its chat model;
    and one may have added tokens, such as a [PAD], whose ids are of none in the other, with a warning.
    """
    here, there = first.vocabulary, other.vocabulary
    taken = {*here.values()}, {*there.values()}
    one, two = (json.loads(each.json) for each in (first, other))
    added = {token["content"] for tree in (one, two) for token in tree["added_tokens"]}
    alone: list[str] = []
    for token in sorted(here.keys() | there.keys(), key=lambda token: here.get(token, len(here))):
        own, its = here.get(token), there.get(token)
        if own == its:
            continue
        is_free = (own is None and its not in taken[0]) or (its is None and own not in taken[1])
        if is_free and token in added:
            alone.append(f"{token} (id {its if own is None else own})")
            continue
        said = ["no id" if number is None else f"id {number}" for number in (its, own)]
        raise UserError(
            f"{others}: has another tokenizer than {name}: {token!r} has {said[0]} in it and {said[1]} "
            "there, so rows of their embeddings are of other tokens; merge models of one vocabulary"
        )
    if alone:
        warnings.warn(
            f"merge: only one of {name} and {others} has {', '.join(alone[:5])}{' ...' * (len(alone) > 5)}; "
            f"in the other that row of the embedding is of no token. The tokenizer written is that of {name}",
            stacklevel=4,
        )
    for part in ("normalizer", "pre_tokenizer", "model"):
        if one[part] != two[part]:
            raise UserError(
                f"{others}: has another tokenizer than {name}: of one vocabulary, but with another {part} in "
                "tokenizer.json, so that texts become other tokens; merge models that read texts alike"
            )
