"""Further models of a run as `RunSpec`s of their own: the teacher of `[distil]`, by what its folder says."""

from __future__ import annotations

from pathlib import Path

from meshwright.spec.architecture import RANDOM
from meshwright.spec.errors import UserError
from meshwright.spec.files import user_path
from meshwright.spec.load import from_tree, load
from meshwright.spec.model import ModelSpec
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.run import RunSpec


def other_models(spec: RunSpec) -> dict[str, RunSpec]:
    """Return the models that a run computes with beside its own, on the same ranks, by name."""
    teacher = teacher_of(spec)
    return {} if teacher is None else {"teacher": teacher}


def teacher_of(spec: RunSpec) -> RunSpec | None:
    """Return the teacher that a run asks, on its layout, with the run's batches; None without one.

    It computes in the run's format where its weights can. Raises `UserError` where there is no model, and
    for a model or a layout that the run cannot learn from.
    """
    if spec.distil is None or spec.distil.teacher is None:
        return None
    folder = user_path(spec.distil.teacher, "distil.teacher")
    model, precision = _read(folder)
    if model.vocab_size != spec.model.vocab_size:
        raise UserError(
            f"distil.teacher: {folder} has a vocabulary of {model.vocab_size:,} tokens, and the student one "
            f"of {spec.model.vocab_size:,}; give model.vocab_size = {model.vocab_size}, with the teacher's "
            f"tokenizer in data.tokenizer"
        )
    if spec.distil.hidden and model.hidden != spec.model.hidden:
        raise UserError(
            f"distil.hidden: {spec.distil.hidden} compares hidden states of equal widths, but {folder} has "
            f"{model.hidden} channels and the student {spec.model.hidden}; give 0, or model.hidden = "
            f"{model.hidden}"
        )
    return on_ranks_of(spec, model, precision)


def is_hf(folder: Path) -> bool:
    """True for an HF folder, False for that of a run. Raises `UserError` for any other path."""
    if (folder / "run.json").is_file():
        return False
    if not (folder / "config.json").is_file():
        problem = "is neither a run's folder (run.json) nor an HF folder (config.json)"
        raise UserError(
            f"distil.teacher: {folder} {problem if folder.exists() else 'is not there'}; give the folder "
            f"of a trained model"
        )
    return True


def _read(folder: Path) -> tuple[ModelSpec, PrecisionSpec]:
    """The model and the precision of its weights that a folder holds."""
    if not is_hf(folder):
        trained = load(folder)
        return trained.model, trained.precision
    shortest = {"data": {"seq_len": 1}, "train": {"batch_tokens": 1}}  # that any model's positions hold
    return from_tree({"model": {"hf": str(folder)}, **shortest}).model, PrecisionSpec()


def on_ranks_of(spec: RunSpec, model: ModelSpec, trained: PrecisionSpec) -> RunSpec:
    """Return a teacher of this model over the ranks of a run. Raises `UserError` if it does not fit."""
    distil = spec.distil
    assert distil is not None
    axes = {"tp": distil.tp, "pp": distil.pp, "cp": distil.cp}
    data = spec.layout.world_size // (distil.tp * distil.pp * distil.cp)
    high = spec.precision.base if spec.precision.base != "fp64" else "fp32"
    compute = "fp64" if trained.base == "fp64" else "bf16" if trained.master == "bf16" else high
    tree = {
        "model": {**model.model_dump(mode="json"), "hf": None, "preset": None, "weights": RANDOM},
        "layout": {**axes, "dp": data, "ep": distil.ep, "zero": distil.zero, "sequence_parallel": False},
        "data": {key: getattr(spec.data, key) for key in ("seq_len", "pack", "document_mask")},
        "train": {"batch_tokens": spec.train.batch_tokens, "batch_warmup": spec.train.batch_warmup},
        "precision": {"compute": compute, "master": trained.master},
    }
    if model.moe is not None:  # the capacity is for training
        tree["model"]["moe"]["capacity_factor"] = None
    try:
        return RunSpec.model_validate(tree)
    except UserError as error:
        raise UserError(
            f"distil: the teacher on dp={data} x tp={distil.tp} x pp={distil.pp} x cp={distil.cp} does not "
            f"fit this run ({error}); give other sizes in distil.tp, distil.pp or distil.cp, where 'layout' "
            f"stands for the teacher's"
        ) from None


def refuse_other_models(spec: RunSpec, verb: str) -> None:
    """Raise `UserError` for a run with further models, whose time and memory a prediction does not count."""
    for table, uncounted in spec.uncounted_tables.items():
        raise UserError(
            f"{table}: {verb} does not count {uncounted}; give --{table} none for the run's model alone"
        )
