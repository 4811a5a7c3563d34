"""`meshwright data show`: samples of chats and of text, with what is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_models import chats, tokenizer_in, written
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from meshwright.api.training_samples import text_parts
from meshwright.cli import output
from meshwright.cli.main import main
from meshwright.data.tokenizer import Tokenizer, byte_tokenizer


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command for 9 chats, and its flags."""
    (tmp_path / "model").mkdir()
    tokenizer_in(tmp_path / "model")
    flags = {
        "data.corpus": written(chats(1, 9), tmp_path / "chats.jsonl"), "data.tokenizer": tmp_path / "model",
        "data.cache": tmp_path / "cache", "data.seq_len": 512, "model.vocab_size": 320, "layout.dp": 1,
        "train.batch_tokens": 512, "data.val_fraction": 0,
    }  # fmt: skip
    return ["data", "show", *(word for key, value in flags.items() for word in (f"--{key}", str(value)))]


def test_what_is_trained_on_is_in_brackets(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(words) == 0
    told = capsys.readouterr().out
    for row in chats(1, 9):
        for message in row["messages"]:
            begin, end = ("⟦", "⟧") if message["role"] == "assistant" else ("", "<")
            shown = f"{message['role']}{begin}\n{message['content']}<|im_end|>\n{end}"
            assert shown in told, message
    assert "in all 2 samples of 512 tokens, with 9 documents" in told


def test_a_program_gets_parts_and_counts(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--data.pack", "false", "--n", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (len(found["samples"]), found["of_samples"], found["of_documents"]) == (4, 9, 9)
    for sample in found["samples"]:
        (document,) = sample["documents"]
        assert document["tokens"] + sample["padding"] == 512
        trained = "".join(part["text"] for part in document["parts"] if part["trained"])
        assert trained.count("<|im_end|>") == trained.count("\n") / 2 > 0
        assert "user" not in trained and 0 < document["trained"] < document["tokens"]


def test_a_cut_is_marked(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cut = ["48" if word == "512" else word for word in words] + ["--data.pack", "false", "--n", "9"]
    assert main([*cut, "--json"]) == 0
    found = [
        each for sample in json.loads(capsys.readouterr().out)["samples"] for each in sample["documents"]
    ]
    lost = [each["lost"] for each in found]
    assert min(lost) == 0 < max(lost) and {each["tokens"] for each in found if each["lost"]} == {48}
    assert main(cut) == 0
    told = capsys.readouterr().out
    assert told.count("cut here") == sum(less > 0 for less in lost)
    assert f"of 48 tokens are trained on; cut here, {max(lost)} tokens lost)" in told


def answers(kind: str, folder: Path) -> Path:
    """Rows of pairs, or of answers with a label; one answer is long."""
    rows: list[dict[str, object]] = []
    for number in range(4):
        good, bad = f" {number}{' and more' * (9 if number == 2 else 1)}", f" not {number}"
        if kind == "judged":
            answer, label = (bad, False) if number % 2 else (good, True)
            rows.append({"prompt": f"Say {number}:", "completion": answer, "label": label})
        else:
            rows.append({"prompt": f"Say {number}:", "chosen": good, "rejected": bad})
    return written(rows, folder / f"{kind}.jsonl")


ROLES = {"pairs": ["chosen", "rejected"], "judged": ["wanted", "of another prompt", "unwanted"]}


@pytest.mark.parametrize("kind", ROLES)
def test_answers_say_what_they_are(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Also which lose their ends, with as many tokens as are lost."""
    loss = ["--preference.loss", "kto" if kind == "judged" else "dpo", "--lora.rank", "2"]
    given = [str(answers(kind, tmp_path)) if word.endswith(".jsonl") else word for word in words] + loss
    found = {}
    for length in ("512", "40"):
        cut = [length if word == "512" else word for word in given] + ["--data.pack", "false", "--n", "9"]
        assert main([*cut, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out.splitlines()[-1])
        found[length] = [each for sample in shown["samples"] for each in sample["documents"]]
        assert len(found[length]) == 8 and {each["role"] for each in found[length]} == set(ROLES[kind])
    told = {"".join(part["text"] for part in each["parts"]): each for each in found["512"]}
    for each in found["40"]:
        (whole,) = (text for text in told if text.startswith("".join(part["text"] for part in each["parts"])))
        assert each["tokens"] + each["lost"] == told[whole]["tokens"]
    assert any(each["lost"] for each in found["40"]) and not any(each["lost"] for each in found["512"])
    assert main([*given, "--n", "1"]) == 0
    assert f"({ROLES[kind][0]}: " in capsys.readouterr().out


def test_all_of_a_text_but_its_begin_is_trained_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("a cat and a dog")
    flags = ["--data.corpus", str(tmp_path / "text.txt"), "--data.tokenizer", "byte", "--data.pack", "false"]
    flags += ["--model.vocab_size", "257", "--data.cache", str(tmp_path / "cache"), "--layout.dp", "1"]
    assert main(["data", "show", *flags, "--data.seq_len", "64", "--train.batch_tokens", "64"]) == 0
    told = capsys.readouterr().out
    assert "<|endoftext|>⟦a cat and a dog⟧" in told
    assert "(15 of 16 tokens are trained on)" in told


def parts(text: str, trained: str) -> list[tuple[str, bool]]:
    """Parts of a text by bytes; those under an x are trained on."""
    ids = byte_tokenizer().encode(text)
    return [*text_parts(byte_tokenizer(), ids, [char == "x" for char in trained.ljust(len(ids))])]


def test_letters_of_several_tokens_stay_whole() -> None:
    assert parts("é☃.", "xx   x") == [("é", True), ("☃", False), (".", True)]
    assert parts("☃", "x") == [("\ufffd", True), ("\ufffd\ufffd", False)]  # a part of a letter is none
    assert parts("", "") == []


def test_words_keep_the_spaces_that_a_decoder_drops_in_front() -> None:
    backend = Backend(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "</s>": 2}, unk_token="</s>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = Tokenizer(backend, 2, None)
    ids = tokenizer.encode("a b a")
    assert [*text_parts(tokenizer, ids, [False, True, True])] == [("a", False), (" b a", True)]


def test_a_terminal_shows_colours_and_obeys_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for terminal, told in ((True, "a\x1b[1;32m\\x1b[31mb\n\x1b[0m\n"), (False, "a⟦\\x1b[31mb\n⟧\n")):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        monkeypatch.delenv("NO_COLOR", raising=False)
        output.marked([("a", False), ("\x1b[31mb\n", True)])
        assert capsys.readouterr().out == told
