"""Tokenizers of published folders beside transformers and gguf on the same files, over a grid of variants."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from meshwright.data.tokenizer import Tokenizer
from meshwright.exchange.gguf_tokenizer import GgufTokenizer, read_tokenizer
from meshwright.exchange.hf_tokenizer import write_tokenizer
from meshwright.spec.hf.special_tokens import copy_side_files, keep_side_files, side_files
from meshwright.spec.hf.text_tokens import MODEL_IDS, model_ids
from meshwright.spec.hf.tokenizer_classes import class_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")

END, START, STOP, LAST = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[END]"]
TEXTS = [
    "the cat", f"cat{START} cat", "a <tool>b <tool> c", f"12 ab [PAD] {LAST}x", STOP, " at  at ", f"cat{END}",
    "", f"{START}user\nthe cat{STOP}\n{START}assistant\n", f"é{LAST} ☃\n\n {STOP} don't",
]  # fmt: skip
VOCAB = 300  # rows of the model's embedding; the tokenizer has 279 tokens
NAMED = {"bos_token": START, "eos_token": STOP}


def token(content: str, **options: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **plain, "special": True, **options}


def every(**changed: dict[str, Any]) -> dict[str, Any]:
    """An added_tokens_decoder with all special tokens, some of them changed, and others."""
    known = {str(number): token(content) for number, content in enumerate(SPECIAL)}
    return {"added_tokens_decoder": known | {key.removeprefix("at"): value for key, value in changed.items()}}


PUTS = {
    "nothing": None, "bos": f"{START} $A", "eos": f"$A {STOP}", "both": f"{START} $A {STOP}",
    "other": f"{LAST} $A", "two": f"{LAST} {START} $A",
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "add bos": ({"add_bos_token": True}, {}),
    "no bos": ({"add_bos_token": False, "add_eos_token": False}, {}),
    "add eos": ({"add_bos_token": True, "add_eos_token": True}, {}),
    "no names": ({"bos_token": None, "eos_token": None}, {}),
    "pad": ({"pad_token": "[PAD]"}, {}),
    "unknown names": ({"unk_token": "<unk>", "mask_token": "[MASK]"}, {}),
    "extra list": ({"extra_special_tokens": ["<tool>"]}, {}),
    "extra names": ({"extra_special_tokens": {"tool_token": "<tool>"}}, {}),
    "additional": ({"additional_special_tokens": ["<tool>", LAST]}, {}),
    "new end": ({"eos_token": "[EOS]"}, {}),
    "new begin": ({"bos_token": "[BOS]"}, {}),
    "own name": ({"image_token": "<tool>"}, {}),
    "strips": (every(at1=token(START, lstrip=True, rstrip=True)), {}),
    "single word": (every(at3=token(LAST, single_word=True)), {}),
    "not special": (every(at3=token(LAST, special=False)), {}),
    "new": (every(at279=token("<tool>")), {}),
    "new word": (every(at279=token("<tool>", special=False, normalized=True, lstrip=True)), {}),
    "added": ({}, {"added_tokens.json": {"<tool>": 300, "[PAD]": 279}}),
    "added and named": ({"pad_token": "[PAD]"}, {"added_tokens.json": {"[PAD]": 279}}),
    "map": ({}, {"special_tokens_map.json": {"eos_token": LAST}}),
    "map of nothing": ({}, {"special_tokens_map.json": {"eos_token": None}}),
    "map of tokens": (
        {},
        {"special_tokens_map.json": {
            "eos_token": token(LAST, lstrip=True), "pad_token": "[PAD]",
            "additional_special_tokens": ["<tool>"],
        }},
    ),
    "map beside a table": (every(), {"special_tokens_map.json": {"eos_token": LAST}}),
    "both lists": (
        {"extra_special_tokens": ["[PAD]"]},
        {"special_tokens_map.json": {"extra_special_tokens": ["<tool>"]}},
    ),
    "a word ends": ({"eos_token": "at"}, {}),
    "split": ({"split_special_tokens": True}, {}),
    "token objects": ({"eos_token": token(LAST) | {"__type": "AddedToken"}}, {}),
}  # fmt: skip
CLASSES = [None, "PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of each of PUTS."""
    folder = tmp_path_factory.mktemp("saved")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the cat sat on the mat, naively " * 50], trainer)
    for name, single in PUTS.items():
        if single is not None:
            special = [(content, backend.token_to_id(content)) for content in SPECIAL]
            backend.post_processor = processors.TemplateProcessing(
                single, f"{single} $B:1", special_tokens=special
            )
        backend.save(str(folder / f"{name}.json"))
    return folder


def write(folder: Path, file: Path, config: dict[str, Any] | None, **beside: Any) -> Path:
    folder.mkdir()
    shutil.copyfile(file, folder / "tokenizer.json")
    files = {"tokenizer_config.json": config, "config.json": {"model_type": "llama"}, **beside}
    for name, content in files.items():
        if content is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def exported(folder: Path, run: Path, out: Path) -> Path:
    """The folder that export writes, but for weights, of a run that import made of `folder`."""
    run.mkdir()
    keep_side_files(side_files(folder, "import"), folder, run, "import")
    out.mkdir()
    copy_side_files(side_files(run, "export"), run, out)
    (out / MODEL_IDS).unlink(missing_ok=True)
    ids = write_tokenizer(out, run / "tokenizer.json", 64, VOCAB)
    (out / "config.json").write_text(json.dumps({"model_type": "llama", **ids}))
    return out


def entries(found: GgufTokenizer) -> dict[int, tuple[str, Any]]:
    """Tokens of a GGUF file by id, with their types."""
    rows = enumerate(zip(found.tokens, map(gguf.TokenType, found.types), strict=True))
    return {number: row for number, row in rows if row[1] != gguf.TokenType.UNUSED}


def their_entries(theirs: Any) -> dict[int, tuple[str, Any]]:
    """Tokens of a tokenizer of transformers, as llama.cpp's converter writes them."""
    kinds = {
        number: gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
        for number, token in theirs.added_tokens_decoder.items()
    }
    ids = theirs.get_vocab().items()
    return {number: (token, kinds.get(number, gguf.TokenType.NORMAL)) for token, number in ids}


def cases() -> Iterator[Any]:
    for number, (name, put) in enumerate((name, put) for name in CONFIGS for put in PUTS):
        for kind in dict.fromkeys((CLASSES[number % 4], CLASSES[number // 6 % 4])):
            if (name, kind) == ("not special", "GPT2Tokenizer"):
                continue  # this class takes no token's options from tokenizer.json
            yield pytest.param(name, put, kind, id=f"{name}-puts {put}-{kind}")


GRID = list(cases())


def test_the_grid_is_large() -> None:
    assert len(GRID) >= 200


@pytest.mark.parametrize(("name", "put", "kind"), GRID)
def test_texts_are_read_as_transformers_reads_them(
    name: str, put: str, kind: str | None, saved: Path, tmp_path: Path
) -> None:
    config, beside = CONFIGS[name]
    config = {**NAMED, **config} | ({} if kind is None else {"tokenizer_class": kind})
    folder = write(tmp_path / "hf", saved / f"{put}.json", config, **beside)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.open(folder, reads_special=True)
    wanted = [theirs(text).input_ids for text in TEXTS]
    assert [ours.around(ours.encode(text)) for text in TEXTS] == wanted
    assert theirs.eos_token_id in (None, ours.end_id)
    assert ours.tokens.bos == theirs.bos_token_id
    plain = Tokenizer.open(folder)
    if name in ("plain", "map", "strips"):  # the last with other options of a token
        same = plain.json == Backend.from_file(str(folder / "tokenizer.json")).to_str()
        assert same == (name != "strips")
    split = [theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in TEXTS]
    assert [plain.encode(text) for text in TEXTS] == split
    special = gguf.SpecialVocab(folder, n_vocab=VOCAB)
    file = read_tokenizer(folder / "tokenizer.json", VOCAB)
    written = file.special
    assert written.special_token_ids == {**written.special_token_ids, **special.special_token_ids}
    assert entries(file) == their_entries(theirs)
    added = {**written.add_special_token, **special.add_special_token}
    if "bos" not in special.special_token_ids:  # gguf does not know the token that is put first
        added["bos"] = put in ("bos", "both", "other")
    assert written.add_special_token == added
    assert "bos" in special.add_special_token or added["bos"] == (put in ("bos", "both", "other"))
    if GRID_EXPORTS[(name, put)] == kind:
        out = exported(folder, tmp_path / "run", tmp_path / "out")
        again = transformers.AutoTokenizer.from_pretrained(out)
        assert [again(text).input_ids for text in TEXTS] == wanted
        for which in ("bos_token", "eos_token", "pad_token"):
            assert getattr(again, which) == getattr(theirs, which)


GRID_EXPORTS = {(case.values[0], case.values[1]): case.values[2] for case in GRID}
"""One class of each row of the grid, whose export is read, too."""

ENDS = [
    None,
    {},
    {"eos_token_id": None},
    {"eos_token_id": 3},
    {"eos_token_id": [3, 2]},
    {"eos_token_id": [0]},
]


@pytest.mark.parametrize("generation", ENDS)
@pytest.mark.parametrize("config", [ends for ends in ENDS if ends is not None])
@pytest.mark.parametrize("named", [{}, {"eos_token": STOP}])
def test_a_generation_ends_where_transformers_ends_it(
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    named: dict[str, Any],
    saved: Path,
    tmp_path: Path,
) -> None:
    config = {"model_type": "llama", **config} | ({"pad_token_id": 7, "bos_token_id": 1} if config else {})
    folder = write(
        tmp_path / "hf", saved / "nothing.json", named,
        **{"config.json": config, "generation_config.json": generation},
    )  # fmt: skip
    theirs = None
    if generation is not None:
        theirs = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    if theirs is None:
        theirs = config.get("eos_token_id")
    stops = theirs if isinstance(theirs, list) else [theirs]
    ours = Tokenizer.open(folder).tokens
    end = 2 if named else stops[0] if theirs is not None else 0  # of no name: END
    assert (ours.end, list(ours.stop_ids)) == (end, stops if theirs is not None else [end])
    out = exported(folder, tmp_path / "run", tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    assert {key: written[key] for key in config} == config
    assert written["eos_token_id"] == config.get("eos_token_id", end)
    assert Tokenizer.open(tmp_path / "run").tokens == ours
    special = gguf.SpecialVocab(folder, n_vocab=VOCAB).special_token_ids
    assert read_tokenizer(tmp_path / "run" / "tokenizer.json", VOCAB).special.special_token_ids == {
        "eos": end, **special
    }  # fmt: skip


def test_added_tokens_that_a_model_has_no_row_for_are_left_out_of_gguf(saved: Path, tmp_path: Path) -> None:
    config = NAMED | {"pad_token": "[PAD]", "extra_special_tokens": ["<tool>"]}
    folder = write(tmp_path / "hf", saved / "bos.json", config)
    whole = their_entries(transformers.AutoTokenizer.from_pretrained(folder))
    rows = len(whole) - 1
    with pytest.warns(UserWarning, match=rf"the model has {rows} embeddings, and none for <tool> of"):
        found = read_tokenizer(folder / "tokenizer.json", rows)
    assert list(enumerate(found.tokens)) == [(number, whole[number][0]) for number in range(rows)]
    folder = write(tmp_path / "end", saved / "bos.json", config | {"eos_token": "[EOS]"})
    with pytest.raises(Exception, match=r"'\[EOS\]', which ends documents by .* is number"):
        read_tokenizer(folder / "tokenizer.json", rows - 1)


CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
TEMPLATES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "in the config": ({"chat_template": TEMPLATE}, {}),
    "named in the config": (
        {"chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "x"}]}, {}
    ),
    "jinja": ({}, {"chat_template.jinja": TEMPLATE + "☃\r\n"}),
    "jinja and the config": ({"chat_template": "other"}, {"chat_template.jinja": TEMPLATE}),
    "several": ({}, {"chat_template.jinja": TEMPLATE, "additional_chat_templates/rag.jinja": "{{ rag }}"}),
    "a processor's": (
        {"chat_template": TEMPLATE},
        {"chat_template.json": json.dumps({"chat_template": TEMPLATE}), "processor_config.json": "{}"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_come_along(name: str, saved: Path, tmp_path: Path) -> None:
    config, beside = TEMPLATES[name]
    folder = write(tmp_path / "hf", saved / "bos.json", NAMED | config, **beside)
    out = exported(folder, tmp_path / "run", tmp_path / "out")
    for file in beside:
        assert (out / file).read_bytes() == (folder / file).read_bytes()
    theirs, again = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, out))
    assert again.chat_template == theirs.chat_template
    rendered = theirs.apply_chat_template(CHAT, tokenize=False)
    assert again.apply_chat_template(CHAT, tokenize=False) == rendered and START in rendered
    ids = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert Tokenizer.open(tmp_path / "run", reads_special=True).encode(rendered) == ids
    written = read_tokenizer(tmp_path / "run" / "tokenizer.json", VOCAB).special.chat_template
    assert written == gguf.SpecialVocab(folder).chat_template


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
