"""How large a model, and how long a training, suits a text and a place: published rules of thumb."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from meshwright.api.run_files.places import Place
from meshwright.spec import ModelSpec

TOKENS_PER_PARAMETER = 20
"""Tokens that a model is trained on for the least compute of a loss (Hoffmann et al. 2022, Chinchilla)."""
PASSES = 4
"""Passes over a text that are worth nearly as much as new text (Muennighoff et al. 2023)."""
DAY = 86400.0
UTILISATION = 0.4
"""Share of the peak that training attains, as most published runs do."""
LEAST_STEPS = 200
"""Steps of a run on little text, below which a model learns next to nothing."""
MOST_LR = ((3e8, 2e-3), (2e9, 1e-3), (2e10, 3e-4))
"""(Parameters up to which, largest learning rate); beyond the last one 1.5e-4. The law knows the compute
alone, which a short run of a large model makes small; 3e-4 and 1.5e-4 are those of Llama 3's 8B and 70B
(Grattafiori et al. 2024)."""
SIZES = (
    "tiny", "small", "smollm2-135m", "smollm2-360m", "llama3.2-1b", "llama3.2-3b", "llama3-8b", "qwen3-32b",
    "llama3-70b", "llama3-405b",
)  # fmt: skip
"""Presets to choose from, by size."""
CONTINUED_LR = ((5e8, 1e-4), (2e9, 5e-5), (2e10, 2e-5))
"""(Parameters up to which, learning rate) of trained weights that go on; beyond the last one 1e-5."""

EPOCHS = 3
"""Passes over chats (Taori et al. 2023, Alpaca)."""
LARGEST_TUNING_BATCH = 64
"""Sequences of a step of tuning (Touvron et al. 2023, Llama 2)."""
TUNING_STEPS = 100
"""Steps that a tuning has at least, as far as batches of few sequences can make them."""
TUNED_LR, LEAST_TUNED_LR = ((1e10, 2e-5),), 1e-5
"""(Parameters up to which, learning rate) of all weights on chats, and that beyond (Alpaca, 7B and 13B)."""
ADAPTERS_LR, LEAST_ADAPTERS_LR = ((2e10, 2e-4),), 1e-4
"""Those of adapters (Dettmers et al. 2023, QLoRA: 7B and 13B, 33B and 65B)."""


@dataclass(frozen=True)
class Given:
    """Sizes of a training that the user gives; None for those that are chosen."""

    tokens: int | None = None
    steps: int | None = None
    batch_tokens: int | None = None

    def length(self, batch_tokens: int) -> int | None:
        """Return the tokens in all that are asked for, in steps of `batch_tokens`."""
        return self.tokens if self.steps is None else self.steps * batch_tokens


@dataclass(frozen=True)
class Budget:
    """The size of a training: tokens in all and of a step, and the peak learning rate."""

    tokens: int
    batch_tokens: int
    lr: float

    @property
    def steps(self) -> int:
        """Optimiser steps, the last of which may be short of a batch."""
        return -(-self.tokens // self.batch_tokens)


def preset_for(text_tokens: int | None, place: Place) -> str:
    """Return the largest of `SIZES` that a day of `place` and `PASSES` over the text give enough tokens.

    The smallest where neither is enough for any.
    """
    flops = place.flops * UTILISATION * DAY
    fits = SIZES[0]
    for name in SIZES:
        parameters = ModelSpec.model_validate({"preset": name}).parameters
        tokens = TOKENS_PER_PARAMETER * parameters
        if 6 * parameters * tokens <= flops and (text_tokens is None or tokens <= PASSES * text_tokens):
            fits = name
    return fits


def from_nothing(
    parameters: int, text_tokens: int | None, seq_len: int, devices: int, given: Given
) -> Budget:
    """Return the budget of a model of so many parameters that is trained from random weights.

    Batch and learning rate, to two digits, are the laws of Bi et al. 2024 (DeepSeek LLM, equation 1).
    """
    wanted = TOKENS_PER_PARAMETER * parameters
    usual = wanted if text_tokens is None else min(wanted, PASSES * text_tokens)
    tokens = max(1, given.tokens or usual)
    compute = 6.0 * parameters * tokens
    batch = given.batch_tokens or _whole_batch(0.2920 * compute**0.3271, seq_len, devices)
    length = given.length(batch) or max(tokens, LEAST_STEPS * batch)
    most = next((lr for size, lr in MOST_LR if parameters <= size), 1.5e-4)
    lr = min(most, 0.3118 * (6.0 * parameters * length) ** -0.125)
    return Budget(length, batch, float(f"{lr:.1e}"))


def continued(
    parameters: int, text_tokens: int | None, seq_len: int, devices: int, passes: int, given: Given
) -> Budget:
    """Return the budget of trained weights that go on for so many passes over a text."""
    tokens = given.tokens or (100_000_000 if text_tokens is None else max(1, passes * text_tokens))
    batch = given.batch_tokens or _whole_batch(min(2.0**19, tokens / LEAST_STEPS), seq_len, devices)
    lr = next((lr for most, lr in CONTINUED_LR if parameters <= most), 1e-5)
    return Budget(given.length(batch) or max(tokens, 10 * batch), batch, lr)


def tuned(parameters: int, samples: int, seq_len: int, devices: int, adapters: bool, given: Given) -> Budget:
    """Return the budget of a model of so many parameters that is tuned on chats in so many samples."""
    wanted = min(LARGEST_TUNING_BATCH, EPOCHS * samples / TUNING_STEPS) * seq_len
    batch = given.batch_tokens or _whole_batch(wanted, seq_len, devices)
    rates, least = (ADAPTERS_LR, LEAST_ADAPTERS_LR) if adapters else (TUNED_LR, LEAST_TUNED_LR)
    lr = next((rate for most, rate in rates if parameters <= most), least)
    steps = -(-EPOCHS * samples * seq_len // batch)
    return Budget(given.length(batch) or steps * batch, batch, lr)


def _whole_batch(wanted: float, seq_len: int, devices: int) -> int:
    """Return a batch near the wanted one of a power of two of sequences, at least one for each device."""
    sequences = 1 << max(0, round(log2(max(1.0, wanted / seq_len))))
    while sequences < devices:
        sequences *= 2
    return sequences * seq_len
