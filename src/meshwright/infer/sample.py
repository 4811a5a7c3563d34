"""A look at what a run has learned: the continuation of a held-out text."""

from __future__ import annotations

import numpy as np

from meshwright.data.corpus import Corpus
from meshwright.infer.generate import generate
from meshwright.model.decoder import Decoder

PROMPT_TOKENS, NEW_TOKENS = 32, 96


def held_out_sample(decoder: Decoder, corpus: Corpus) -> dict[str, str] | None:
    """{"prompt", "text"}: the start of the first held-out document and what the decoder writes after it.

    None where the corpus has no held-out text. On several ranks all call this, since each may hold a part of
    the parameters; all get the same text.
    """
    if not corpus.validation.target_tokens or not corpus.has_text:
        return None
    first = corpus.validation.gather(np.zeros(1, dtype=np.int64))
    prompt = [int(token) for token in first.tokens[0, :PROMPT_TOKENS]]
    end, limit = corpus.tokenizer.end_id, corpus.tokenizer.vocab_size
    written = generate(decoder, prompt, NEW_TOKENS, temperature=0.7, top_k=50, stop_id=end, limit=limit)
    shown = [token for token in prompt if token != end]
    return {"prompt": corpus.tokenizer.decode(shown), "text": corpus.tokenizer.decode(written)}
