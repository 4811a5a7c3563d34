"""Quantisation of trained models: a folder that other programs open, and a table of what it costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshwright.api.models import existing, is_run_folder, load_hf, load_run
from meshwright.api.options import Option, Weights, tokens
from meshwright.api.ranks import Result
from meshwright.rank.scratch import scratch_folder
from meshwright.spec import UserError, load
from meshwright.spec.errors import did_you_mean
from meshwright.spec.files import read_text
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.precision import Quantised
from meshwright.spec.quantisation import ALGORITHMS, CALIBRATION_TOKENS, GROUPS, RECIPES

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.exchange.hf_quantised import Quantisation
    from meshwright.exchange.parameter_source import ParameterSource
    from meshwright.model.decoder import Decoder
    from meshwright.model.quantisation import Codes
    from meshwright.spec import RunSpec

MOST_TEXT = 64 << 20
"""Bytes of a text of calibration that are read."""
LENGTH, ROWS = 2048, 8
"""Most tokens of a sequence of calibration, and sequences at a time."""


def _group(text: str) -> int:
    if text not in map(str, GROUPS):
        raise ValueError(f"it should be one of {', '.join(map(str, sorted(GROUPS)))}")
    return int(text)


GroupSize = Annotated[int | None, Option(
    "columns that share a scale in int4; default the largest that divides all widths",
    "|".join(map(str, sorted(GROUPS))), _group)]  # fmt: skip
Calibration = Annotated[Path | None, Option("text for GPTQ instead of a run's training data", "FILE", Path)]
CalibrationTokens = Annotated[int, Option("tokens for GPTQ", "N", tokens())]
Keep = Annotated[Sequence[str], Option(
    "leave layers in bf16 whose names match, such as '*.down_proj'; may be repeated", "PATTERN", str,
    repeated=True)]  # fmt: skip


def quantise(
    run: Path,
    folder: Path,
    recipe: str,
    *,
    group_size: GroupSize = None,
    algorithm: str = "rtn",
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = CALIBRATION_TOKENS,
    keep: Keep = (),
    weights: Weights = "trained",
) -> Result:
    """Write the model of a run, or of an HF folder, as an HF folder with quantised linear layers.

    `recipe` is 'int8', 'int4', 'int8-dynamic' or 'fp8'; columns of int4 share a scale in groups of
    `group_size` (32, 64 or 128; by default `precision.qat_group` of a run that was trained for int4, or else
    the largest that divides all widths). `algorithm` is 'rtn', round to nearest, or 'gptq', which takes
    `calibration_tokens` tokens of a text file, or of a run's training data. `keep` are patterns of layers
    that stay in bf16, as the embedding and the head do. Returns `folder`, `recipe`, `group_size`, `layers`
    (how many are quantised), `kept` (names) and `bytes` (of all weights). Raises `UserError`.
    """
    run, folder = Path(run), Path(folder)
    _one_of("recipe", recipe, RECIPES)
    _one_of("algorithm", algorithm, ALGORITHMS)
    if algorithm == "rtn" and calibration is not None:
        raise UserError("--calibration: rtn takes no text; remove it, or give --algorithm gptq")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"FOLDER: {folder} exists and is not an empty folder; give another")
    source = _Source(run, weights)
    import torch

    from meshwright.exchange.hf_quantised import NearestCodes, stored_bytes
    from meshwright.exchange.parameter_source import ShapesAlone
    from meshwright.exchange.stored_weights import tensor_shapes
    from meshwright.weights.quantise import check_calibrated, plan_quantisation

    how = plan_quantisation(source.model, recipe, source.group(recipe, group_size), keep)  # type: ignore[arg-type]
    batches = []
    if algorithm == "gptq":
        check_calibrated(source.model)
        batches = source.calibration(calibration, calibration_tokens)
    _write_quantised(source, folder, how, batches)
    shapes = tensor_shapes(source.model)
    return {
        "folder": str(folder),
        "recipe": recipe,
        "group_size": how.group or None,
        "layers": len(NearestCodes(source.model, ShapesAlone(shapes, torch.float32), how)),
        "kept": list(how.kept),
        "bytes": stored_bytes(source.model, shapes, how),
    }


def compare_quantisation(
    run: Path,
    *,
    recipe: str | None = None,
    group_size: GroupSize = None,
    keep: Keep = (),
    sensitivity: str = "block",
    eval_tokens: Annotated[
        int | None, Option("with --compare, held-out tokens; default all", "N", tokens())
    ] = None,
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = CALIBRATION_TOKENS,
    weights: Weights = "trained",
    told: Callable[[str, Result], None] | None = None,
) -> Result:
    """Measure a run's model in bf16 and by each recipe, on its held-out text.

    Returns `table` (a row for each recipe, rounded to nearest and, for int4 of dense models, by GPTQ:
    `bits_per_byte`, `change_percent`, `computed_bytes`, `file_bytes`, `tokens_per_second`) and `sensitivity`
    (a row for each 'block' or 'linear' layer: what quantising it alone by `recipe`, by default int4, changes;
    'none' leaves it out). A recipe that the model cannot take is left out, with its reason in `refused`.
    `eval_tokens` is the number of held-out tokens, by default all. `told` is called with 'table' or
    'sensitivity' and each row as it is found.
    """
    _one_of("recipe", recipe or "int4", RECIPES)
    _one_of("sensitivity", sensitivity, ("block", "linear", "none"))
    source = _Source(Path(run), weights)
    spec = source.spec
    if spec is None:
        raise UserError(f"--compare: {run} is an HF folder, which has no held-out text; give a run")
    from meshwright.data.corpus import open_corpus
    from meshwright.infer.quantisation_table import HeldOutBatches, Model, compare
    from meshwright.infer.quantisation_table import sensitivity as measure

    plans, refused = source.plans(group_size, keep)
    measured: Quantised = recipe or "int4"  # type: ignore[assignment]
    if not plans or (sensitivity != "none" and measured not in plans):
        raise UserError(refused[measured])
    corpus = open_corpus(spec)
    if not corpus.validation.target_tokens or not corpus.has_text:
        raise UserError(f"--compare: {run} has no held-out text; train it on text with data.val_fraction")
    dense = spec.model.moe is None and "int4" in plans
    batches = source.calibration(calibration, calibration_tokens) if dense else []
    measure_by = Model(source.decoder(), HeldOutBatches.read(corpus, spec, eval_tokens), batches)
    wanted = [(None, False), *((how, False) for how in plans.values())]
    wanted += [(plans["int4"], True)] if dense else []
    table = []
    with scratch_folder() as folder:
        for row in compare(measure_by, wanted, folder):
            table.append(row)
            if told is not None:
                told("table", row)
    rows: list[Result] = []
    if sensitivity != "none":
        rows = measure(measure_by, plans[measured], sensitivity == "block")
    return {"table": table, "recipe": measured, "sensitivity": rows, "refused": refused}


class _Source:
    """A run's folder or an HF folder as the source of a model in fp32. Raises `UserError` for others."""

    def __init__(self, run: Path, weights: str) -> None:
        self.run, self.weights = existing(run, "the folder of a run or of an HF model"), weights
        self.spec: RunSpec | None = None
        if is_run_folder(run):
            self.spec = load(run)
            self.model = self.spec.model
            return
        if weights != "trained":
            raise UserError(f"--weights: {run} is an HF folder, which has one set of weights; give 'trained'")
        if read_json_object(run / "config.json", "quantise").get("quantization_config") is not None:
            raise UserError(f"quantise: {run} is quantised already; give the folder that it was made of")
        from meshwright.exchange.hf import import_hf

        self.model, _ = import_hf(run)

    def group(self, recipe: str, given: int | None) -> int | None:
        """The group that is asked for, or that the run was trained for."""
        if given is None and recipe == "int4" and self.spec is not None and self.spec.precision.qat == recipe:
            return self.spec.precision.qat_group
        return given

    def plans(
        self, group_size: int | None, keep: Sequence[str]
    ) -> tuple[dict[Quantised, Quantisation], dict[str, str]]:
        """The quantisation by each recipe that the model can take, and why it cannot take the others."""
        from meshwright.weights.quantise import plan_quantisation

        plans: dict[Quantised, Quantisation] = {}
        refused: dict[str, str] = {}
        for recipe in RECIPES:
            try:
                group = self.group(recipe, group_size if recipe == "int4" else None)
                plans[recipe] = plan_quantisation(self.model, recipe, group, keep)
            except UserError as error:
                refused[recipe] = str(error)
        return plans, refused

    def decoder(self) -> Decoder:
        """The decoder in fp32."""
        if self.spec is None:
            return load_hf(self.run).float()
        return load_run(self.run, weights=self.weights).float()

    def calibration(self, file: Path | None, count: int) -> list[Tensor]:
        """Tokens (B, T) of a text, or of a run's training data in the order of its steps."""
        import torch

        if file is not None:
            return self._text(file, count)
        if self.spec is None:
            raise UserError(f"--calibration: {self.run} is an HF folder, which has no data; give a text file")
        from meshwright.data.corpus import open_corpus
        from meshwright.data.loader import Loader

        needed = -(-count // self.spec.data.seq_len)
        loader = Loader(open_corpus(self.spec), self.spec, 0, 1)
        rows: list[Tensor] = []
        while len(rows) < needed:
            rows += loader.step(len(rows) // self.spec.batch_sequences).tokens
        loader.close()
        return list(torch.stack(rows[:needed]).split(ROWS))

    def _text(self, file: Path, count: int) -> list[Tensor]:
        import torch

        from meshwright.data.tokenizer import Tokenizer

        try:
            text = read_text(file, MOST_TEXT)
        except (OSError, ValueError) as error:
            raise UserError(f"--calibration: {file} cannot be read ({error}); give a text file") from None
        tokenizer = Tokenizer.open(self.run / "tokenizer.json")
        ids = torch.tensor(tokenizer.encode(text)[:count], dtype=torch.int64)
        length = min(LENGTH, self.model.max_seq_len, max(1, len(ids)))
        rows = ids[: len(ids) // length * length].view(-1, length)
        if not len(ids):
            raise UserError(f"--calibration: {file} has no tokens; give a text file")
        if len(ids) < (widest := max(self.model.hidden, self.model.ffn)):
            warnings.warn(
                f"--calibration: {len(ids):,} tokens tell little of a matrix with {widest:,} inputs; give "
                f"more text, or --algorithm rtn, which takes none",
                stacklevel=2,
            )
        return list(rows.split(ROWS))


def _write_quantised(source: _Source, folder: Path, how: Quantisation, batches: Sequence[Tensor]) -> None:
    """Write the folder, by GPTQ where there are `batches` of tokens.

    Rounding to nearest holds one parameter at a time, and GPTQ one block.
    """
    import torch

    from meshwright.exchange.hf import export_hf, import_hf
    from meshwright.exchange.hf_quantised import NearestCodes
    from meshwright.exchange.parameter_source import LastRead, ReadParameters
    from meshwright.exchange.stored_weights import tensor_shapes
    from meshwright.weights.quantise import CalibratedCodes
    from meshwright.weights.saved_weights import of_whole_checkpoint

    run, model, file = source.run, source.model, source.run / "tokenizer.json"
    tokenizer = file if file.is_file() else None

    def write(tensors: ParameterSource) -> None:
        codes: Mapping[str, Codes] = (
            CalibratedCodes(model, tensors, how, batches)
            if batches
            else NearestCodes(model, LastRead(tensors), how)
        )
        quantised = how, codes
        export_hf(folder, model, tensors, tokenizer, torch.bfloat16, side_files=run, quantised=quantised)

    if source.spec is not None:
        of_whole_checkpoint(run, None, source.weights == "ema", write)
    else:
        _, weights = import_hf(run)
        write(ReadParameters(weights, tensor_shapes(model)))


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        hint = did_you_mean(value, known)
        raise UserError(f"{name}: {value!r} is not one of {', '.join(known)}{hint}")
