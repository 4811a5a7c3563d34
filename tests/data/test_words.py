from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_texts import texts
from sample_tokenizers import sentencepiece_like
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from meshwright.cpp_library import SWITCH
from meshwright.data import tokenize as cutting
from meshwright.data.tokenizer import END, Tokenizer, byte_tokenizer, number_tokenizer, train_bpe
from meshwright.data.word_rule import GPT2, LLAMA3, QWEN2, WordRule, word_rule
from meshwright.data.word_table import CompiledWordTable, WordTable, library_path
from meshwright.data.words import Words
from sanitizers import address_sanitizer, output

LIBRARY = library_path()
RULES = {"gpt2": GPT2, "llama3": LLAMA3, "qwen2": QWEN2}
SPACES = (
    "\t\n\v\f\r \x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2000\u2003\u2028\u2029\u202f\u205f\u3000\u200b\ufeff"
)
STRANGE = "'sS\u017fK\u0301éжªº²½Ⅷ٣漢字한\u1161\u093e☃👩\u200d😀\U00016d63\u0378\x00\x7f_-=()\"#0123456789aZ"
WORDS = [
    "'s",
    "'LL",
    "'re",
    "can't",
    "\r\n",
    "\n\n",
    "    ",
    "x_1 = f(a, b)",
    "<|endoftext|>",
    "<think>",
    "ab ",
]
TEXT = st.lists(st.one_of(st.text(SPACES + STRANGE, max_size=6), st.sampled_from(WORDS), st.text(max_size=4)))


def backend_of(kind: str, ignore_merges: bool = False) -> Backend:
    """A trained tokenizer of one of the known rules; Qwen's has a normalizer and an added token."""
    backend = Backend(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind != "gpt2":
        split = pre_tokenizers.Split(Regex(RULES[kind].pattern), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    sample = [*texts(30), *("".join(map(chr, range(first, first + 40))) for first in range(32, 1200, 40))]
    backend.train_from_iterator([*sample, *WORDS, *SPACES], trainer)
    backend.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
        backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
        backend.add_special_tokens(["<|im_start|>"])
    return backend


TOKENIZERS = {kind: Tokenizer(backend_of(kind), 0, None) for kind in RULES}
TOKENIZERS["ignoring merges"] = Tokenizer(backend_of("llama3", ignore_merges=True), 0, None)


@pytest.fixture(params=["compiled", "python"], scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Words by the library in C++, and without it."""
    if request.param == "compiled" and not LIBRARY:
        pytest.skip("the library needs a C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setenv(SWITCH, "1")
        yield


def encoded(words: Words, piece: str) -> list[int]:
    return np.frombuffer(words.encode([piece])[0], "<u2").tolist()


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(parts=TEXT)
def test_ids_are_those_of_the_library(kind: str, parts: list[str]) -> None:
    text = "".join(parts)
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.rule is not None
    words = Words(tokenizer.rule, tokenizer.json, "<u2")
    assert encoded(words, text) == tokenizer.encode(text)
    assert encoded(words, text) == tokenizer.encode(text)  # now that its words are known


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(parts=TEXT, limit=st.integers(20, 60))
def test_pieces_of_a_text_have_its_ids(kind: str, parts: list[str], limit: int) -> None:
    text = "".join(part[:9] + " " for part in parts)  # spaces, so that there is a place to cut
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.rule is not None
    pieces = list(cutting._pieces(text, limit, tokenizer.rule))
    places = np.cumsum([len(piece) for piece in pieces])[:-1].tolist()
    if all(tokenizer.rule.may_cut(text[place - 1], text[place]) for place in places):
        assert list(chain.from_iterable(map(tokenizer.encode, pieces))) == tokenizer.encode(text)
    assert "".join(pieces) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_long_text_in_one_piece_or_many(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.rule is not None
    text = "\n".join(texts(40, seed=3)) + "x);\n\n\tif 'don't':\r\n  漢字);\n\r\n y = 12345\n" * 50
    words = Words(tokenizer.rule, tokenizer.json, "<u2")
    whole = tokenizer.encode(text)
    assert encoded(words, text) == whole
    monkeypatch.setattr(cutting, "PIECE", 100)
    pieces = list(cutting._long_pieces(text, tokenizer))
    assert len(pieces) > len(text) // 200
    assert [i for piece in pieces for i in encoded(words, piece)] == whole


def changed(change: Callable[[Backend], object], kind: str = "gpt2") -> WordRule | None:
    """The rule of a tokenizer after `change`."""
    backend = backend_of(kind)
    change(backend)
    return word_rule(json.loads(backend.to_str()))


def test_only_tokenizers_whose_words_stand_alone_have_a_rule() -> None:
    for kind, rule in RULES.items():
        assert word_rule(json.loads(backend_of(kind).to_str())) == rule
    split = pre_tokenizers.Split(Regex(LLAMA3.pattern), "removed")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for change in (
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda b: setattr(b, "pre_tokenizer", spelled),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Sequence([split, spelled])),
        lambda b: setattr(b, "pre_tokenizer", None),
        lambda b: setattr(b, "normalizer", normalizers.NFKC()),
        lambda b: setattr(b.model, "dropout", 0.1),
        lambda b: b.add_tokens(["a b"]),
        lambda b: b.add_tokens([AddedToken("ab", lstrip=True)]),
        lambda b: b.add_tokens([AddedToken("ab", single_word=True)]),
    ):
        assert changed(change) is None
    assert changed(lambda b: b.add_tokens(["ab"])) == GPT2
    assert changed(lambda b: b.add_tokens(["ab"]), "qwen2") is None  # found in what is normalized
    assert changed(lambda b: b.add_special_tokens(["a b"])) == GPT2
    for other in ("llama 2", "always", "first"):
        assert sentencepiece_like(other).rule is None
    assert number_tokenizer(50).rule is None and byte_tokenizer().rule is None


def by_library(samples: list[str], size: int) -> str:
    """The tokenizer.json of a BPE that the library trains."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(samples, trainer)
    return backend.to_str()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["a", "ab", "aaab", "-= ", "abc '", STRANGE + SPACES]).flatmap(
        lambda letters: st.lists(st.text(letters, max_size=120), max_size=6)
    ),
    st.integers(257, 400),
)
def test_training_learns_what_the_library_learns(samples: list[str], size: int) -> None:
    """Runs of one letter make pairs that overlap, and tokens that two merges spell."""
    assert train_bpe(samples, size).json == by_library(samples, size)


def test_training_on_more_text(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [*texts(300, seed=5), "=" * 700, "ab" * 300, "a" * 501]
    whole = train_bpe(samples, 900)
    assert whole.json == by_library(samples, 900)
    monkeypatch.setattr("meshwright.data.word_table.MOST_KNOWN", 10)
    assert train_bpe(samples, 900).json == whole.json


def test_kept_pieces_have_the_ids_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = texts(100, seed=2)
    tokenizer = TOKENIZERS["gpt2"]
    expected = [tokenizer.encode(text) for text in samples]
    for most in (2**20, 5):
        for module in ("words", "word_table"):
            monkeypatch.setattr(f"meshwright.data.{module}.MOST_KNOWN", most)
        words = Words(GPT2)
        numbers = [words.keep([(text, None)]) for text in samples]
        words.word_counts()
        words.load(tokenizer.json, "<u2")
        assert [np.frombuffer(words.kept(n)[0], "<u2").tolist() for n in numbers] == expected
        assert [encoded(words, text) for text in samples] == expected
        words.drop()
        assert [encoded(words, text) for text in samples] == expected


def test_a_vocabulary_that_lacks_bytes() -> None:
    """Its ids do not spell their words, and so do not tell where one ends."""
    vocab = {letter: number for number, letter in enumerate("Ġabcde\u010a")}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "ab cd\nxyz ea x a\n1 b é dde"
    words = Words(GPT2, backend.to_str(), "<u2")
    assert encoded(words, text) == backend.encode(text).ids
    assert encoded(words, text[::-1]) == backend.encode(text[::-1]).ids


@pytest.mark.skipif(not LIBRARY, reason="the library needs a C++ compiler")
@settings(max_examples=200, deadline=None)
@given(parts=TEXT, kind=st.sampled_from([*RULES]))
def test_tables_number_words_alike(parts: list[str], kind: str) -> None:
    tables = [WordTable(RULES[kind]), CompiledWordTable(RULES[kind], LIBRARY)]
    texts = ["".join(parts), "".join(parts[::-1])]
    found = [[each.tolist() for each in table.numbers(texts)] for table in tables]
    assert found[0] == found[1]
    assert tables[0].words() == tables[1].words() and tables[0].words(1) == tables[1].words(1)


@pytest.mark.skipif(address_sanitizer() is None, reason="it needs g++ with its address sanitizer")
def test_sanitizers_find_nothing() -> None:
    assert output(Path(__file__).with_name("sanitised_word_table.py")) == "3000 texts\n"
