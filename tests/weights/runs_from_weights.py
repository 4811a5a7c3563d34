"""Short runs on weights of transformers, and their export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hf_models import same_files
from meshwright import api
from meshwright.api.initial_weights import initial_weights_told
from meshwright.spec import load

WORDS = "the cat sat on the mat, naïvely"


def tokenizer_of(folder: Path, special: Sequence[str] = (), words: Sequence[str] = ()) -> None:
    """Save a byte-level BPE of 300 entries in a folder, with `special` ones and `words` added after them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    letters = (f"{a}{b}{c} " for a in "abcdefg" for b in "hijkl" for c in "mnopq")
    tokenizer.train_from_iterator([WORDS * 50, *letters], trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(words))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def flags(theirs: Path, **more: object) -> dict[str, str]:
    """Dotted flags of a short run on the folder's corpus, which changes no weight that is not 0."""
    given: dict[str, object] = {
        "data.corpus": theirs.parent / "corpus.jsonl", "data.cache": theirs.parent / "cache",
        "data.seq_len": 16, "train.batch_tokens": 64, "train.steps": 1, "train.lr": 1e-30, "layout.dp": 1,
    }  # fmt: skip
    return {key: str(value) for key, value in (given | more).items()}


def trained(
    theirs: Path, out: Path, path: Path | None = None, resume: str | None = None, **more: object
) -> Any:
    given = flags(theirs, **{key.replace("__", "."): value for key, value in more.items()})
    return api.train(load(path, list(given.items())), out=out, quiet=True, resume=resume)


def exported_equals(theirs: Path, run: Path, out: Path) -> None:
    api.export(run, out)
    same_files(out, theirs)


def told(theirs: Path, path: Path | None = None, **more: object) -> str:
    """Return the line about the weights of a run with these flags, or ''."""
    given = flags(theirs, **{key.replace("__", "."): value for key, value in more.items()})
    return initial_weights_told(load(path, list(given.items())), path) or ""
