"""Samples of a run as it reads them, with what each trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from meshwright.spec import RunSpec

if TYPE_CHECKING:
    from meshwright.data.corpus import Corpus
    from meshwright.data.tokenizer import Tokenizer

Result = dict[str, Any]


def data_show(spec: RunSpec, n: int = 3) -> Result:
    """Return the first n samples that a run trains on, by document, in parts that are trained on or not.

    `role` says which answer a document is, of pairs and of judged answers; `lost` are the tokens at the end
    of a chat that is too long for a sample, which are not read. Text is tokenized first where it is not yet.
    Raises `UserError`.
    """
    import numpy as np

    from meshwright.data.corpus import open_corpus

    corpus = open_corpus(spec)
    numbers = np.arange(min(n, corpus.train.samples))
    source_N, index_N = corpus.order(spec.train.seed).at(numbers)
    samples = [
        {"sample": number, "corpus": corpus.names[source], **_sample(corpus, source, index)}
        for number, source, index in zip(numbers.tolist(), source_N.tolist(), index_N.tolist(), strict=True)
    ]
    return {
        "samples": samples,
        "of_samples": corpus.train.samples,
        "of_documents": corpus.train.documents,
        "seq_len": spec.data.seq_len,
    }


def _sample(corpus: Corpus, source: int, index: int) -> Result:
    """Return one sample of a source: its documents, and how many tokens are padding."""
    import numpy as np

    from meshwright.data.packing import IGNORE
    from meshwright.data.whole_documents import WholeDocuments

    side = corpus.train.sides[source]
    before = side.targets_before(np.array([index, index + 1]))
    used = int(before[1] - before[0])
    tokens, targets, _, documents = (array[0] for array in side.gather(np.array([index])))
    trained = np.concatenate([[False], targets[:-1] != IGNORE])
    trained &= np.diff(documents, prepend=-1) == 0  # the first token of a document follows none of its own
    found = []
    numbers = np.unique(documents[:used]).tolist()  # those of judged answers leave some out
    roles, lost = [""] * len(numbers), [0] * len(numbers)
    if isinstance(side, WholeDocuments):
        roles, lost = [side.role(number) for number in numbers], side.lost(index)
    for number, role, less in zip(numbers, roles, lost, strict=True):
        own = np.flatnonzero(documents[:used] == number)
        parts = [
            {"text": text, "trained": learned}
            for text, learned in text_parts(corpus.tokenizer, tokens[own].tolist(), trained[own].tolist())
        ]
        counts = {"tokens": len(own), "trained": int(trained[own].sum()), "lost": less}
        found.append({**counts, "role": role, "parts": parts})
    return {"documents": found, "padding": len(tokens) - used}


def text_parts(
    tokenizer: Tokenizer, ids: Sequence[int], trained: Sequence[bool]
) -> Iterator[tuple[str, bool]]:
    """Yield the text of tokens in parts that are trained on or not, with which.

    Bytes of a character that is divided between two parts become U+FFFD.
    """
    start, told = 0, 0
    for learned, group in groupby(trained):
        end = start + len([*group])
        if tokenizer.is_byte_level:
            text = tokenizer.decode(ids[start:end])
        else:  # a first word would lose its space
            text = tokenizer.decode(ids[:end])[told:]
        yield text, learned
        start, told = end, told + len(text)
