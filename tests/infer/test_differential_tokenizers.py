"""Tokenizers of published folders beside transformers and gguf on the same files, over a grid of variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_variants import (
    CONFIGS,
    END,
    LAST,
    NAMED,
    START,
    STOP,
    VOCAB,
    cases,
    gguf,
    transformers,
    write,
)
from tokenizers import Tokenizer as Backend

from meshwright.data.tokenizer import Tokenizer
from meshwright.exchange.gguf_tokenizer import GgufTokenizer, read_tokenizer
from meshwright.exchange.hf_tokenizer import write_tokenizer
from meshwright.spec.hf.special_tokens import copy_side_files, keep_side_files, side_files
from meshwright.spec.hf.text_tokens import MODEL_IDS

TEXTS = [
    "the cat", f"cat{START} cat", "a <tool>b <tool> c", f"12 ab [PAD] {LAST}x", STOP, " at  at ", f"cat{END}",
    "", f"{START}user\nthe cat{STOP}\n{START}assistant\n", f"é{LAST} ☃\n\n {STOP} don't",
]  # fmt: skip


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
