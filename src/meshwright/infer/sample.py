"""A look at what a run has learned: the continuation of a held-out text."""

from __future__ import annotations

import numpy as np

from meshwright.checkpoint.gather_full import gather_full
from meshwright.data.corpus import Corpus
from meshwright.infer.generate import generate
from meshwright.infer.sampling import Sampling
from meshwright.model.decoder import Decoder
from meshwright.model.lora import attach_adapters
from meshwright.train.step import Trainer

PROMPT_TOKENS, NEW_TOKENS = 32, 96

MOST_BYTES = 4 * 2**30
"""Largest size of a decoder that is gathered on one rank for the sample."""


def held_out_sample(trainer: Trainer, corpus: Corpus) -> dict[str, str] | None:
    """Return {"prompt", "text"}: the start of the first held-out document and the decoder's continuation.

    The result is None where the corpus has no held-out text. All ranks call this, since each may hold a part
    of the parameters. Where layers, sequences, experts or (ZeRO-3) parameters are split, the first rank
    writes on a whole copy, which is gathered once, and the others get None; if the model is too large for
    that, all do.
    """
    if not corpus.validation.target_tokens or not corpus.has_text:
        return None
    layout = trainer.mesh.layout
    split = layout.tp * layout.cp * layout.pp * layout.ep * layout.etp > 1
    split |= layout.zero == 3 and layout.dp > 1
    read = trainer.mesh.control.together  # a rank that cannot read must not leave the others waiting
    first = read(lambda: corpus.validation.gather(np.zeros(1, dtype=np.int64)))
    decoder = _whole(trainer) if split else trainer.decoder
    if decoder is None:
        return None
    prompt = [int(token) for token in first.tokens[0, :PROMPT_TOKENS]]
    end, limit = corpus.tokenizer.end_id, corpus.tokenizer.vocab_size
    text = generate(decoder, prompt, NEW_TOKENS, Sampling(0.7, 50), [end], limit)
    shown = [token for token in prompt if token not in (corpus.tokenizer.begin_id, end)]
    return {"prompt": corpus.tokenizer.decode(shown), "text": corpus.tokenizer.decode(text)}


def _whole(trainer: Trainer) -> Decoder | None:
    """Return the decoder on one device, on the first rank; None on the others, and if it is too large."""
    if 4 * trainer.spec.model.parameters > MOST_BYTES:
        return None
    decoder = None
    if trainer.mesh.control.rank == 0:
        decoder = attach_adapters(Decoder(trainer.spec.model), trainer.spec.lora)
        decoder = decoder.to(trainer.mesh.device, trainer.states.formats.master)
    mine = decoder.tensors() if decoder is not None else {}
    stored = [*trainer.states.parameters(), *trainer.balance.biases().items()]
    gather_full(stored, trainer.mesh, into=mine)
    return decoder
