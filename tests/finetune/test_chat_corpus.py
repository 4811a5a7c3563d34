"""Corpora of chats: what rows are told to be, how they are read, what is counted and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from chat_models import chats, tokenizer_in, written

from meshwright import api
from meshwright.api.verify_runs import on_chats
from meshwright.data.chat_source import NOTHING_TRAINED
from meshwright.data.corpus import Corpus, open_corpus
from meshwright.data.packing import IGNORE
from meshwright.spec import UserError, load

MESSAGES = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
TURNS = [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]
ROWS: dict[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGES},
    "sharegpt": {"conversations": TURNS},
    "alpaca": {"instruction": "one", "input": "two", "output": "three"},
    "prompt": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
}
"""A chat in each format; alpaca has the end of a line between question and input."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    tokenizer_in(made)
    return made


def corpus_of(folder: Path, corpus: Path | None, file: Path | None = None, **flags: object) -> Corpus:
    given: dict[str, object] = {
        "data.tokenizer": folder, "data.cache": folder.parent / "cache", "data.seq_len": 128,
        "data.val_fraction": 0, "model.vocab_size": 320, "model.max_seq_len": 128,
        "train.batch_tokens": 128, "layout.dp": 1,
    }  # fmt: skip
    given |= {"data.corpus": corpus} if corpus is not None else {}
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    return open_corpus(load(file, [(key, str(value)) for key, value in given.items()]))


def trained_texts(corpus: Corpus) -> list[str]:
    """The text that each sample is trained on."""
    samples = corpus.train.gather(np.arange(corpus.train.samples))
    return [corpus.tokenizer.decode(row[row != IGNORE].tolist()) for row in samples.targets]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("told", [True, False], ids=["told", "by its keys"])
def test_a_row_of_each_format_is_the_same_chat(kind: str, told: bool, folder: Path, tmp_path: Path) -> None:
    corpus = written([ROWS[kind]], tmp_path / "rows.jsonl")
    found = corpus_of(folder, corpus, data__format=kind if told else "auto")
    assert found.marked == [True]
    # The newline is the prompt's in a prompt, and the answer's by the template's markers.
    assert trained_texts(found) == ["three<|im_end|>\n" if kind == "prompt" else "\nthree<|im_end|>\n"]
    if kind != "alpaca":
        plain = corpus_of(folder, written([ROWS["chat"]], tmp_path / "chat.jsonl"))
        ours, theirs = (each.train.gather(np.zeros(1, dtype=np.int64)) for each in (found, plain))
        assert np.array_equal(ours.tokens, theirs.tokens)


def test_rows_with_a_text_are_text(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": "one two three " * 50, "messages": MESSAGES}]
    assert corpus_of(folder, written(rows, tmp_path / "rows.jsonl")).marked == [False]


def test_a_row_that_may_be_two_things_is_asked_about(folder: Path, tmp_path: Path) -> None:
    corpus = written([ROWS["chat"] | ROWS["alpaca"]], tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match=r"may be chat or alpaca; give one of them as data\.format"):
        corpus_of(folder, corpus)
    assert trained_texts(corpus_of(folder, corpus, data__format="alpaca")) == ["\nthree<|im_end|>\n"]


def test_files_of_each_kind_have_the_same_chats(folder: Path, tmp_path: Path) -> None:
    rows = chats(3, 8)
    wanted = trained_texts(corpus_of(folder, written(rows, tmp_path / "rows.jsonl"), data__pack="false"))
    assert len(wanted) == 8
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for name in ("rows.parquet", "saved", "rows.json"):
        assert trained_texts(corpus_of(folder, tmp_path / name, data__pack="false")) == wanted


def test_a_folder_has_the_chats_of_all_its_files(
    folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "data").mkdir()
    rows = chats(4, 6)
    written(rows[:4], tmp_path / "data" / "a.jsonl")
    written(rows[4:], tmp_path / "data" / "b.jsonl")
    (tmp_path / "data" / "README.md").write_text("about the chats")
    found = trained_texts(corpus_of(folder, tmp_path / "data", data__pack="false"))
    whole = corpus_of(folder, written(rows, tmp_path / "rows.jsonl"), data__pack="false")
    assert found == trained_texts(whole)
    assert any("left out 1 file without rows; it has 6 chats left" in str(each.message) for each in recwarn)


def test_text_and_chats_are_mixed(folder: Path, tmp_path: Path) -> None:
    text = written([{"text": "one two three " * 100}], tmp_path / "text.jsonl")
    rows = written(chats(5, 6), tmp_path / "chats.jsonl")
    file = tmp_path / "run.toml"
    file.write_text(f'[data.mixture]\n"{text}" = 0.5\n"{rows}" = 0.5\n')
    corpus = corpus_of(folder, None, file)
    assert corpus.marked == [False, True]
    targets = corpus.train.gather(np.arange(corpus.train.samples)).targets
    assert (targets[0] != IGNORE).all()
    assert (targets[-1] == IGNORE).any() and (targets[-1] != IGNORE).any()


def test_columns_say_what_rows_call_their_keys(folder: Path, tmp_path: Path) -> None:
    rows = [{"question": "one", "answer": "three", "output": "other", "source": "x"}]
    corpus = written(rows, tmp_path / "rows.jsonl")
    columns = {"data.columns.instruction": "question", "data.columns.output": "answer"}
    assert trained_texts(corpus_of(folder, corpus, **columns)) == ["\nthree<|im_end|>\n"]
    names = {"columns": {"instruction": "question", "output": "answer"}}
    counts = api.tokenize(str(corpus), str(folder), tmp_path / "out", vocab_size=320, **names)
    assert counts.documents == 1
    other = {**columns, "data.columns.output": "output"}
    assert trained_texts(corpus_of(folder, corpus, **other)) == ["\nother<|im_end|>\n"]
    with pytest.raises(UserError, match=r"data.columns.output: the first row of .* has no key 'answr'; did"):
        corpus_of(folder, corpus, **{**columns, "data.columns.output": "answr"})


def test_a_table_has_lists_as_json(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text('instruction,output,history\none,two,"[[""three"", ""four""]]"\none,two,\n')
    corpus = corpus_of(folder, table, data__pack="false")
    asked, plain = "\nfour<|im_end|>\n\ntwo<|im_end|>\n", "\ntwo<|im_end|>\n"
    assert trained_texts(corpus) == [asked, plain]


def test_rows_of_another_format_are_told_with_their_place(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    written([ROWS["chat"]], data / "a.jsonl")
    written([ROWS["alpaca"]], data / "b.jsonl")
    words = r"b.jsonl line 1, key 'messages': it is missing; .* make it alpaca, .* corpora by data.mixture"
    with pytest.raises(UserError, match=words):
        corpus_of(folder, data)
    rows = written([{"text": "one"}, ROWS["chat"]], tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match=r"rows.jsonl line 2 has no key 'text'; .* mixed by data.mixture"):
        corpus_of(folder, rows)


def test_what_is_not_trained_on_is_counted(
    folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    rows = [ROWS["chat"], {"messages": []}, {"messages": MESSAGES[:1]}, ROWS["chat"]]
    corpus = str(written(rows, tmp_path / "rows.jsonl"))
    counts = api.tokenize(corpus, str(folder), tmp_path / "out", vocab_size=320)
    assert counts.documents == 2
    (text,) = {*trained_texts(corpus_of(folder, tmp_path / "out", data__pack="false"))}
    assert counts.utf8_bytes == 2 * len(text.replace("<|im_end|>", ""))
    assert counts.skipped[NOTHING_TRAINED] == 1 and sum(counts.skipped.values()) == 2
    assert any("it has 2 chats left" in str(each.message) for each in recwarn)


def test_tokenized_chats_are_a_corpus(folder: Path, tmp_path: Path) -> None:
    rows = written(chats(6, 9), tmp_path / "rows.jsonl")
    api.tokenize(str(rows), str(folder), tmp_path / "out", vocab_size=320)
    ours, theirs = (corpus_of(folder, each) for each in (tmp_path / "out", rows))
    numbers = np.arange(theirs.train.samples)
    for one, other in zip(ours.train.gather(numbers), theirs.train.gather(numbers), strict=True):
        assert np.array_equal(one, other)
    assert ours.digest == theirs.digest


def test_what_a_cut_loses_is_told(folder: Path, tmp_path: Path) -> None:
    rows = written(chats(7, 9), tmp_path / "rows.jsonl")
    with pytest.warns(
        UserWarning,
        match=r"data\.seq_len: a limit of 40 tokens cuts .* chats of .*; lost at the end: 5 tokens \(5 to",
    ):
        corpus_of(folder, rows, data__seq_len=40, train__batch_tokens=40)


def test_a_chat_that_a_cut_leaves_nothing_of_is_left_out(folder: Path, tmp_path: Path) -> None:
    late = {"messages": [{"role": "user", "content": "one two " * 40}, MESSAGES[1]]}
    corpus = written([ROWS["chat"], late, ROWS["chat"]], tmp_path / "rows.jsonl")
    with pytest.warns(UserWarning, match=r"left out 1 chat of .* no room for a word to train on is left"):
        found = corpus_of(folder, corpus, data__seq_len=80, data__pack="false", train__batch_tokens=80)
    assert trained_texts(found) == 2 * ["\nthree<|im_end|>\n"]
    with pytest.raises(UserError, match=r"data\.seq_len: no chat of .* has tokens to train on within 80"):
        rows = written([late], tmp_path / "late.jsonl")
        corpus_of(folder, rows, data__seq_len=80, train__batch_tokens=80)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"content": "three"}, ""),
        (
            {"content": [{"type": "text", "text": "three"}]},
            "in 1 of 2 chats the chat template does not",
        ),
        ({"content": ""}, "in 1 of 2 chats the assistant says nothing in a turn"),
    ],
)
def test_what_a_template_leaves_out_is_told(
    said: dict[str, Any], told: str, folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The template renders no list of parts, and has markers."""
    template = folder / "chat_template.jinja"
    words = "(message.content if message.content is string else '') + '"
    template.write_text(template.read_text().replace("message.content + '", words))
    rows = [ROWS["chat"], {"messages": [MESSAGES[0], {"role": "assistant", **said}]}]
    corpus_of(folder, written(rows, tmp_path / "rows.jsonl"))
    warned = [str(each.message) for each in recwarn if "2 chats the" in str(each.message)]
    assert len(warned) == bool(told) and all(told in each for each in warned)


def test_tools_that_a_template_does_not_render_are_told(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    rows = written([ROWS["chat"] | {"tools": [tool]}], tmp_path / "rows.jsonl")
    with pytest.warns(UserWarning, match="in 1 of 1 chats the chat template does not render words"):
        corpus_of(folder, rows)


WRONG: dict[str, tuple[Sequence[dict[str, Any]], dict[str, object], str]] = {
    "no template": (
        [ROWS["chat"]],
        {"data__tokenizer": "byte"},
        "has no chat template",
    ),
    "no tokenizer": ([ROWS["chat"]], {"data__tokenizer": "bpe"}, "holds chats, which need the tokenizer"),
    "wrong role": (
        [{"messages": [{"role": "robot", "content": "one"}]}],
        {},
        r"rows.jsonl line 1, key 'messages\[0\].role': it is .robot.; give one of system",
    ),
    "no such format": ([{"text": "one"}], {"data__format": "chat"}, "key 'messages': it is missing"),
    "no mask": (
        [ROWS["chat"]],
        {"data__document_mask": "false"},
        r"data\.document_mask: false lets chats that share a sample see each other",
    ),
    "no such file": ([ROWS["chat"]], {"data__chat_template": "/none.jinja"}, r"data\.chat_template: /none"),
    "nothing to train on": ([{"messages": MESSAGES[:1]}], {}, "holds no chat to train on"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_sentence(name: str, folder: Path, tmp_path: Path) -> None:
    rows, flags, sentence = WRONG[name]
    with pytest.raises(UserError, match=sentence):
        corpus_of(folder, written([*rows], tmp_path / "rows.jsonl"), **flags)


def test_text_without_rows_is_no_chat(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three")
    with pytest.raises(UserError, match=r"data\.format: .*text\.txt has no rows, and chats are rows"):
        corpus_of(folder, tmp_path / "text.txt", data__format="chat")


def test_a_run_on_chats_is_verified_on_chats(folder: Path, tmp_path: Path) -> None:
    rows, text = written(chats(9, 3), tmp_path / "rows.jsonl"), tmp_path / "text.txt"
    text.write_text("one two three")
    api.tokenize(str(rows), str(folder), tmp_path / "out", vocab_size=320)
    for corpus, kind in (
        (rows, "chat"),
        (tmp_path / "out", "chat"),
        (text, "auto"),
        (tmp_path / "no", "auto"),
    ):
        spec = load(None, [("data.corpus", str(corpus)), ("data.tokenizer", str(folder))])
        assert on_chats(spec).data.format == kind


def test_another_template_is_another_corpus(folder: Path, tmp_path: Path) -> None:
    rows = written(chats(8, 9), tmp_path / "rows.jsonl")
    before = corpus_of(folder, rows).digest
    template = folder / "chat_template.jinja"
    other = tmp_path / "other.jinja"
    other.write_text(template.read_text().replace("You are Qwen", "You are nobody"))
    assert corpus_of(folder, rows, data__chat_template=other).digest != before
    template.write_text(other.read_text())
    assert corpus_of(folder, rows).digest != before
