"""Classes of tokenizers in transformers: which are read as they are, and which are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizer_variants import (
    END,
    NAMED,
    transformers,
    write,
)
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from meshwright.data.tokenizer import Tokenizer
from meshwright.spec.hf.text_tokens import model_ids
from meshwright.spec.hf.tokenizer_classes import class_of

STEPS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "a space first": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "whole": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    "metaspace": pre_tokenizers.Metaspace(),
}


@pytest.mark.parametrize("options", [{}, {"add_prefix_space": True}, {"legacy": True}], ids=str)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    "kind", ["GPT2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizer", "PreTrainedTokenizer"]
)
def test_a_class_that_reads_texts_by_steps_of_its_own_is_told(
    kind: str, steps: str, options: dict[str, bool], tmp_path: Path
) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = STEPS[steps]
    bytes_level = steps != "metaspace"
    backend.decoder = decoders.ByteLevel() if bytes_level else decoders.Metaspace()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if bytes_level else []
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(
        ["the cat sat on 1234 mats 99 99 1234, it's don't 12 12 it's\n\n x"] * 9, trainer
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    folder = write(tmp_path / "hf", tmp_path / "tokenizer.json", {"tokenizer_class": kind, **options})
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.open(folder)
    texts = ["the cat", " 1234 don't\n\n x", "it's 99, 12", "sat  on"]
    same = [theirs(text, add_special_tokens=False).input_ids for text in texts] == [*map(ours.encode, texts)]
    assert ours.published is not None
    assert same or any("makes other tokens of some texts" in remark for remark in ours.published.remarks)
    if kind == "PreTrainedTokenizer":
        assert same and not list(ours.published.remarks)


@pytest.mark.parametrize("steps", ["gpt2", "metaspace"])
@pytest.mark.parametrize(
    "kind",
    [
        "BartTokenizer", "CodeLlamaTokenizer", "CohereTokenizerFast", "GPTNeoXTokenizerFast",
        "Qwen3_5Tokenizer", "RobertaTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend",
        "OtherTokenizer",
    ],
)  # fmt: skip
def test_a_class_that_is_not_known_is_told(kind: str, steps: str, saved: Path, tmp_path: Path) -> None:
    backend = Backend.from_file(str(saved / "bos.json"))
    backend.pre_tokenizer = STEPS[steps]
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {**NAMED, "tokenizer_class": kind, "add_bos_token": False}
    folder = write(tmp_path / "hf", tmp_path / "tokenizer.json", config)
    published = Tokenizer.open(folder).published
    assert published is not None
    remarks = list(published.remarks)
    generic = kind in ("PreTrainedTokenizerFast", "TokenizersBackend")
    assert any("as transformers does" in remark for remark in remarks) == generic
    assert any("may do otherwise" in remark for remark in remarks) == (not generic)
    ours = [published.tokens.before[0], *Tokenizer.open(folder).encode("the cat")]
    if generic:
        assert transformers.AutoTokenizer.from_pretrained(folder)("the cat").input_ids == ours


MODEL_CLASSES = {"gpt_neox": "GPTNeoXTokenizer", "cohere2": "CohereTokenizer", "qwen3_5": "Qwen3_5Tokenizer"}


@pytest.mark.parametrize("model_type", [*MODEL_CLASSES, "gpt2", "qwen2", "gemma3_text", "llama", "mistral"])
def test_the_class_of_a_model_type_is_that_of_transformers(
    model_type: str, saved: Path, tmp_path: Path
) -> None:
    configs = {"config.json": {"model_type": model_type}}
    folder = write(tmp_path / "hf", saved / "bos.json", NAMED, **configs)
    theirs = type(transformers.AutoTokenizer.from_pretrained(folder)).__name__
    assert class_of(NAMED, model_type) == ("" if theirs == "TokenizersBackend" else theirs)


def test_a_class_is_tried_on_newlines_and_on_tokens_without_spaces(tmp_path: Path) -> None:
    gpt2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
    pattern = rf"{gpt2}|(?<!\s)\n\n(?=\p{{L}})|\s+(?!\S)|\s+"  # and pairs of newlines
    lines = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    first = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    cases: list[tuple[str, Any, str, dict[str, Any]]] = [
        ("GPT2Tokenizer", lines, "a\n\nb", {}),
        ("LlamaTokenizer", first, f"a{END}b", {"legacy": True}),
    ]
    for kind, steps, text, options in cases:
        backend = Backend(models.BPE())
        backend.pre_tokenizer = steps
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=[END], show_progress=False,
            initial_alphabet=[*pre_tokenizers.ByteLevel.alphabet(), "▁"],
        )  # fmt: skip
        backend.train_from_iterator(["a\n\nb b a\n\n"] * 9, trainer)
        backend.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": kind, "eos_token": END, **options}
        folder = write(tmp_path / kind, tmp_path / "tokenizer.json", config)
        ours = Tokenizer.open(folder, reads_special=True)
        assert transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids != ours.encode(text)
        assert ours.published is not None
        assert any("other tokens of some texts" in remark for remark in ours.published.remarks)


def test_ids_of_a_config_that_are_none_are_one_sentence(saved: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", saved / "bos.json", NAMED, **{"config.json": {"eos_token_id": "2"}})
    with pytest.raises(Exception, match=r"config\.json has eos_token_id \"2\"; it must be an id, a list of"):
        model_ids(folder, "import")
