"""Tokenizers for the tests of data."""

from __future__ import annotations

from sample_texts import texts
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from meshwright.data.tokenizer import (
    Tokenizer,
)


def sentencepiece_like(kind: str) -> Tokenizer:
    """Words begin with U+2581, which also stands before a text: Llama 2's way, or Metaspace's."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True))
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first" if kind == "first" else "always")
    backend.pre_tokenizer = metaspace
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "</s>"], show_progress=False)
    backend.train_from_iterator(texts(60), trainer)
    backend.decoder = decoders.Metaspace()
    if kind == "llama 2":
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    return Tokenizer(backend, end_id=1, bos_id=None)
