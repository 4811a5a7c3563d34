"""A byte-level BPE as GGUF describes it to llama.cpp.

llama.cpp's program has the regular expressions of pre-tokenizers, by name (src/llama-vocab.cpp, version
0.5.0). Its converter finds the name by a hash of a text's token ids, which no newly trained tokenizer can
match. Here it is found by the pre-tokenizer itself.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from meshwright.spec.errors import UserError
from meshwright.spec.hf.special_tokens import copy_side_files, side_files
from meshwright.spec.hf.text_tokens import PublishedTokenizer, model_ids, open_published

if TYPE_CHECKING:
    from gguf import GGUFWriter, SpecialVocab

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
NAMES: dict[tuple[str, ...], tuple[str, bool]] = {
    ("ByteLevel regex",): ("gpt-2", False),
    ("Digits", "ByteLevel regex"): ("smollm", False),
    (rf"{_WORDS}\p{{N}}{{1,3}}{_ENDS}", "ByteLevel"): ("llama-bpe", True),
    (rf"{_WORDS}\p{{N}}{_ENDS}", "ByteLevel"): ("qwen2", False),
    (_CASED, "ByteLevel"): ("tekken", True),
    (r"\p{N}{1,3}", _CHINESE, _DEEPSEEK, "ByteLevel"): ("deepseek-v3", False),
}  # fmt: skip
"""Steps of a pre-tokenizer -> llama.cpp's name, and whether words of the vocabulary need no merges."""


@dataclass(frozen=True)
class GgufTokenizer:
    """Entries of the vocabulary by id, their types (of `gguf.TokenType`), merges, the special tokens, and the
    chat template."""

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    special: SpecialVocab

    @property
    def eos(self) -> int:
        """The token that ends a text."""
        return self.special.special_token_ids["eos"]

    def write(self, writer: GGUFWriter) -> None:
        """Add the keys of the tokenizer to a GGUF file."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        self.special.add_to_gguf(writer, quiet=True)


def read_tokenizer(file: Path, vocab_size: int) -> GgufTokenizer:
    """Return the tokenizer of a `tokenizer.json` for a model of `vocab_size` embeddings.

    Raises `UserError` for one that llama.cpp does not know, and for an end of documents beyond the model's
    vocabulary.
    """
    found = open_published(file, "export")
    found.check_end(vocab_size)
    tree = found.tree
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tree["model"].get("merges", [])]
    pre = _name(tree, merges, file)
    tokens, types = _entries(found, file, vocab_size)
    return GgufTokenizer(
        pre, tokens, types,
        merges or ["Ġ Ġ"],  # a list is needed; this merge gives no token, so its bytes stay
        _special(found, file, vocab_size),
    )  # fmt: skip


def _entries(found: PublishedTokenizer, file: Path, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the token of each row of the embedding, and its type.

    Tokens that the files beside tokenizer.json add are among them. Added ones that the model has no row for,
    as a [PAD] that came later, are left out with a warning; raises `UserError` for others.
    """
    import gguf

    tokens = [f"[PAD{number}]" for number in range(vocab_size)]  # rows of the embedding without a token
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    added, beyond = found.backend.get_added_tokens_decoder(), []
    for token, number in sorted(found.backend.get_vocab(with_added_tokens=True).items()):
        if number < vocab_size:
            tokens[number], types[number] = token, int(gguf.TokenType.NORMAL)
        elif number in added:
            beyond.append(token)
        else:
            raise UserError(
                f"export: {file} has a token of id {number}, and the model has {vocab_size} embeddings; put "
                "the model's own tokenizer there"
            )
    if beyond:
        warnings.warn(
            f"export: the model has {vocab_size} embeddings, and none for {', '.join(beyond)} of {file} or "
            "the files beside it; llama.cpp will read them as other text",
            stacklevel=4,
        )
    for number in (number for number in added if number < vocab_size):
        kind = gguf.TokenType.CONTROL if added[number].special else gguf.TokenType.USER_DEFINED
        types[number] = int(kind)
    return tokens, types


def _special(found: PublishedTokenizer, file: Path, vocab_size: int) -> SpecialVocab:
    """Return the special tokens and the chat template, as gguf's converters read them in an HF folder.

    What they do not find there is what the tokenizer does with texts.
    """
    import gguf

    with TemporaryDirectory() as name:
        folder = Path(name)
        copy_side_files(side_files(file.parent, "export"), file.parent, folder)
        (folder / "config.json").write_text(json.dumps(model_ids(file.parent, "export")), encoding="utf-8")
        with _without_pairs():
            special = gguf.SpecialVocab(folder, n_vocab=vocab_size)
    tokens, ids, added = found.tokens, special.special_token_ids, special.add_special_token
    first, end = tokens.named
    ids.setdefault("eos", end)
    if "bos" not in ids and first is not None:
        ids["bos"], added["bos"] = first, len(tokens.before) == 1
    added.setdefault("bos", bool(tokens.before))
    if tokens.before != ((ids["bos"],) if added["bos"] and "bos" in ids else ()):
        names = [str(found.backend.id_to_token(number)) for number in tokens.before]
        warnings.warn(
            f"export: {file} puts {' '.join(names) or 'nothing'} before a text, and llama.cpp will put "
            f"{found.backend.id_to_token(ids['bos']) if added['bos'] and 'bos' in ids else 'nothing'} there, "
            "as its converter would; check the first token of a prompt",
            stacklevel=4,
        )
    return special


@contextmanager
def _without_pairs() -> Iterator[None]:
    """Drop what gguf's reader logs of templates for two texts, which no model of text is given."""
    logger = logging.getLogger("gguf.vocab")

    def is_wanted(record: logging.LogRecord) -> bool:
        return "in TemplateProcessing<pair>" not in record.getMessage()

    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


def _name(tree: dict[str, Any], merges: list[str], file: Path) -> str:
    """Return llama.cpp's name of a tokenizer's pre-tokenizer. Raises `UserError`."""
    model, steps = tree["model"], _steps(tree["pre_tokenizer"])
    problem = ""
    marks = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model["type"] != "BPE" or marks or not steps or not steps[-1].startswith("ByteLevel"):
        problem = "is not a byte-level BPE"
    elif (tree["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        problem = f"has the normalizer {tree['normalizer']['type']}"
    elif steps == ("ByteLevel",) and not merges:
        return "gpt-2"  # of single bytes: wherever a text is split, its tokens are the same
    elif steps not in NAMES:
        problem = f"has a pre-tokenizer that llama.cpp does not know ({' + '.join(steps)})"
    elif bool(model.get("ignore_merges")) != NAMES[steps][1]:
        problem = "takes words without merges otherwise than llama.cpp does"
    if problem:
        raise UserError(
            f"export: {file} {problem}; export to a folder, for transformers and vLLM, or for llama.cpp's "
            "convert_hf_to_gguf.py if the tokenizer is a published one"
        )
    return NAMES[steps][0]


def _steps(step: dict[str, Any] | None) -> tuple[str, ...]:
    """Return a pre-tokenizer's steps: the expressions of splits, and the kinds of others."""
    if step is None:
        return ()
    if step["type"] == "Sequence":
        return tuple(each for part in step["pretokenizers"] for each in _steps(part))
    plain = {
        "Split": step.get("behavior") == "Isolated" and not step.get("invert"),
        "ByteLevel": not step.get("add_prefix_space"),
        "Digits": step.get("individual_digits"),
    }
    if not plain.get(step["type"]):
        return (f"{step['type']} with options",)
    if step["type"] == "Split":
        return (step["pattern"].get("Regex", "").replace("\r", r"\r").replace("\n", r"\n"),)
    return ("ByteLevel regex" if step["type"] == "ByteLevel" and step["use_regex"] else step["type"],)
