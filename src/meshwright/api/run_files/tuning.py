"""A run file that tunes a model on chats: adapters or all weights, lengths, learning rate, passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.api.run_files.budget import EPOCHS, Budget, Given, tuned
from meshwright.api.run_files.chats import COVERED, ChatLengths, chat_lengths
from meshwright.api.run_files.draft import Draft
from meshwright.api.run_files.places import Place
from meshwright.spec import UserError
from meshwright.spec.load import given_keys
from meshwright.units import gigabytes, short

STATE_BYTES = 16
"""Bytes that a trained parameter takes: itself, its gradient and AdamW's two moments, each in fp32."""
MOST_FOR_STATES = 0.5
"""Share of the memory that those may take; the rest is for activations."""
FEW_CHATS, TOO_FEW_CHATS = 2000, 20
"""Chats below which 5% are held out rather than 2%, and below which none are."""


def add_tuning(
    draft: Draft, corpus: str, own: Mapping[str, str], where: Place, may_adapt: bool, given: Given
) -> list[str]:
    """Add what tunes the draft's model on the chats `corpus`, and return what to know of it.

    `own` are keys of `[data]` that the chats are read with. Without `may_adapt`, or keys of `[lora]` that the
    user gives, all weights are trained. Raises `UserError`.
    """
    draft.add("data.corpus", corpus)
    for name, value in own.items():
        draft.add(f"data.{name}", value, "as the run has read it")
    model, lengths = draft.sizeless.model, chat_lengths(draft.sizeless)
    if lengths.pairs and draft.sizeless.preference is None:
        raise UserError(
            f"--have: {corpus} has pairs of chosen and rejected answers, which need a loss of pairs; give "
            "--preference.loss dpo with --lora.rank 16, or --preference.loss simpo or orpo"
        )
    fitting = lengths.seq_len(model.max_seq_len)
    draft.add("data.seq_len", fitting, f"{lengths.within(fitting):.0%} of the chats fit into these tokens")
    draft.add("data.pack", True, "chats that fit share a sample, and none sees another")
    _hold_out(draft, lengths)
    adapters, why = _add_adapters(draft, model.parameters, where, may_adapt)
    data = given_keys("data", {}, draft.texts)
    seq_len, samples = data["seq_len"], lengths.samples(data["seq_len"], data["pack"])
    budget = tuned(model.parameters, samples, seq_len, where.devices, adapters, given)
    passes = budget.tokens / (samples * seq_len)
    _add_training(draft, budget, where, adapters, f"{passes:.2g} passes over about {samples:,} samples")
    about = "" if lengths.looked_at == lengths.rows else "about "
    told = f"{about}{lengths.chats:,} chats, in about {samples:,} samples of {seq_len:,} tokens; "
    told += f"{passes:.2g} passes in {budget.steps:,} steps"
    return [told, why, *_too_long(lengths, model.max_seq_len)]


def _too_long(lengths: ChatLengths, most: int) -> Iterator[str]:
    """Yield a sentence if more than a few chats are longer than the model's positions."""
    if lengths.within(most) < COVERED:
        yield (
            f"{1 - lengths.within(most):.0%} of the chats are longer than the {most:,} tokens that the model "
            "takes, and lose their ends"
        )


def _hold_out(draft: Draft, lengths: ChatLengths) -> None:
    few = lengths.chats < TOO_FEW_CHATS
    fraction = 0.0 if few else 0.05 if lengths.chats < FEW_CHATS else 0.02
    why = "too few chats to hold any out" if few else "share of the chats that is held out to validate with"
    draft.add("data.val_fraction", fraction, why)


def _add_adapters(draft: Draft, parameters: int, where: Place, may_adapt: bool) -> tuple[bool, str]:
    """Add adapters where the model is large for the devices; return whether there are any, and why."""
    states = STATE_BYTES * parameters
    sizes = (
        f"the weights of {short(parameters)} parameters, their gradients and AdamW's moments take "
        f"{gigabytes(states)} of the {gigabytes(where.memory)} of {where.told}"
    )
    if any(key.startswith("lora.") for key in draft.given):
        return True, f"adapters, as asked for; {sizes} where all are trained"
    if not may_adapt:
        return False, f"all weights are trained, as asked for; {sizes}"
    if states <= MOST_FOR_STATES * where.memory:
        return False, f"all weights are trained: {sizes}; --lora.rank 16 trains adapters instead"
    draft.add("lora.rank", 16, f"adapters (Hu et al. 2021), since {sizes}")
    draft.add("lora.alpha", 32.0, "twice the rank, as is usual")
    return True, f"adapters of rank 16 are trained: {sizes}; --lora none trains all weights"


def _add_training(draft: Draft, budget: Budget, where: Place, adapters: bool, why: str) -> None:
    if "train.tokens" not in draft.given:
        draft.add("train.steps", budget.steps, f"{why}, of {EPOCHS} that are usual (Taori et al. 2023)")
    draft.add("train.batch_tokens", budget.batch_tokens, "tokens of a step, over all devices")
    rate = "Dettmers et al. 2023, QLoRA" if adapters else "Taori et al. 2023, Alpaca"
    draft.add("train.lr", budget.lr, f"as {'of adapters' if adapters else 'of all weights'} in {rate}")
    draft.add("train.weight_decay", 0.0, "few steps do not need any")
    if draft.spec.data.val_fraction:
        draft.add("train.eval_every", max(1, budget.steps // 10), "steps between losses of held-out chats")
    draft.add(
        "precision.compute",
        where.cluster.device.default_format,
        "number format of products; " + ("adapters" if adapters else "master weights") + " stay fp32",
    )
    draft.add("checkpoint.every", "auto", "steps between saves, by what one costs; resume: --resume auto")
