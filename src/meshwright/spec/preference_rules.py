"""Rules on `[preference]` and what goes with it."""

from __future__ import annotations

from meshwright.spec.architecture import RANDOM
from meshwright.spec.differences import as_in_file
from meshwright.spec.errors import UserError
from meshwright.spec.sections import Sections
from meshwright.spec.verification import VerifyOptions


def reference_is_the_base(spec: Sections) -> None:
    """DPO and KTO compare the model with its own frozen weights, which adapters leave as they are."""
    preference = spec.preference
    if preference is None or not preference.has_reference or preference.precompute_ref_log_probs:
        return
    if spec.lora is None:
        raise UserError(
            f"preference.loss: {preference.loss!r} compares the model with a frozen reference, and "
            f"without [lora] nothing of it is frozen; give --lora.rank 16, whose base is the reference, "
            f"preference.precompute_ref_log_probs = true, or preference.loss = 'simpo' or 'orpo', which need "
            f"none"
        )
    if spec.lora.weights != RANDOM:
        raise UserError(
            f"preference.reference: 'base' is the model without the adapters of {spec.lora.weights}, and the "
            f"run begins with them; give --preference.precompute_ref_log_probs true, whose reference is the "
            f"model that the run begins with, or --from {spec.lora.weights} instead of --adapter, which "
            f"merges them and begins new ones"
        )


def keys_of_losses_have_an_effect(spec: Sections) -> None:
    """Keys of one loss go with it; a default counts as not given."""
    if (preference := spec.preference) is None:
        return
    takers = {
        "label_smoothing": ("dpo", "simpo"), "simpo_gamma": ("simpo",),
        "desirable_weight": ("kto",), "undesirable_weight": ("kto",),
        "precompute_ref_log_probs": ("dpo", "kto"),
    }  # fmt: skip
    for key, losses in takers.items():
        value, default = getattr(preference, key), type(preference).model_fields[key].default
        if preference.loss not in losses and value != default:
            raise UserError(
                f"preference.{key}: {as_in_file(value)} has no effect with "
                f"preference.loss = {preference.loss!r}; leave it out, or give "
                f"preference.loss = {' or '.join(map(repr, losses))}"
            )


def pairs_are_learned_from(spec: Sections) -> None:
    """Rows are pairs, each answer of which sees its own tokens alone."""
    if spec.preference is None:
        return
    judged = ["judged"] * spec.preference.judged
    if spec.data.format not in ("auto", "preference", *judged):
        instead = " or 'judged' and rows with prompt, completion and label," * len(judged)
        raise UserError(
            f"data.format: {spec.data.format!r} has no pairs of answers for [preference]; give 'preference' "
            f"and rows with chosen and rejected,{instead} or --preference none"
        )
    if not spec.data.document_mask:
        raise UserError(
            "data.document_mask: false lets a rejected answer see the chosen one before it; leave it out, or "
            "give --preference none"
        )
    if spec.data.seq_len < 4:
        raise UserError(
            f"data.seq_len: {spec.data.seq_len} tokens hold no pair of answers with their prompts; give at "
            f"least 4"
        )


def no_other_loss(spec: Sections) -> None:
    """The loss of pairs is the only one."""
    if spec.preference is None:
        return
    for table, source in spec.tables_of_models.items():
        raise UserError(
            f"{table}: {source} changes the loss of tokens, and [preference] has one of pairs; give "
            f"--{table} none or --preference none"
        )
    if spec.model.mtp_num_layers:
        raise UserError(
            f"model.mtp_num_layers: {spec.model.mtp_num_layers} does not go with [preference], whose loss is "
            f"of the next tokens alone; give model.mtp_num_layers = 0"
        )
    if spec.precision.low:
        raise UserError(
            f"precision.compute: {spec.precision.compute!r} was not compared with one device under "
            f"[preference]; try precision.compute = 'bf16'"
        )
    if spec.outer.every or spec.outer.staleness:
        key = "every" if spec.outer.every else "staleness"
        raise UserError(
            f"outer.{key}: {getattr(spec.outer, key)} was not compared with one device under [preference]; "
            f"give outer.{key} = 0"
        )


def pairs_are_compared(asked: VerifyOptions) -> None:
    """`verify` compares losses of pairs in float64, and through a checkpoint or a snapshot."""
    if asked.spec.preference is None:
        return
    if asked.spec.preference.precompute_ref_log_probs:
        raise UserError(
            "preference.precompute_ref_log_probs: verify reads synthetic samples, of which nothing is "
            "stored; give --preference.precompute_ref_log_probs false, with --lora.rank 16 for a reference"
        )
    option = "--precision run" if asked.precision == "run" else ""
    if asked.through == "export":
        option = "--through export"
    if option:
        raise UserError(
            f"preference: {option} compares cross-entropy alone; remove it, or give --preference none"
        )


PREFERENCE_RULES = (
    no_other_loss,
    reference_is_the_base,
    keys_of_losses_have_an_effect,
    pairs_are_learned_from,
)
