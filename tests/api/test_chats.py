"""Answers to chats beside transformers' generate on the same rendered prompts, and conversations."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.api import chats
from meshwright.api.generation import Generation
from meshwright.api.options import completed
from meshwright.cli.main import main
from meshwright.spec import UserError
from meshwright.spec.load import one_line

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDS = [0, 2]
HOW = completed(Generation, {"max_new_tokens": 24})
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "the cat"}], "id": 7},
    {"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "naïve \n "}]},
    {
        "messages": [
            {"role": "user", "content": "sat"},
            {"role": "assistant", "content": "on"},
            {"role": "user", "content": "the mat"},
            {"role": "assistant", "content": "left out"},
        ]
    },
    {"messages": [{"role": "user", "content": "<|im_end|> spelled"}], "tools": [{"name": "x"}]},
    {"conversations": [{"from": "human", "value": "cat"}]},
    {"prompt": "the mat"},
    {"prompt": [{"role": "user", "content": "naïvely"}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers with random weights, whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat, naïvely user assistant system " * 50], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[2])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=ENDS,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()  # in which no rounding tips a choice
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)


def wanted(folder: Path, model: Any, messages: Any, tools: Any = None) -> tuple[list[int], str, bool]:
    """Prompt, text, and whether a token ended it, of transformers' greedy generation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    found = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    new = found[0, len(ids) :].tolist()
    ended = new[-1] in ENDS
    return ids, tokenizer.decode(new[: len(new) - ended]), ended


def asked(row: dict[str, Any]) -> Any:
    """The messages of one of `ROWS` up to its last question."""
    if "conversations" in row:
        return [{"role": "user", "content": "cat"}]
    given = row.get("messages", row.get("prompt"))
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return messages[:3] if len(messages) == 4 else messages


def test_answers_are_those_of_transformers(folder: Path, model: Any, tmp_path: Path) -> None:
    file, out = tmp_path / "chats.jsonl", tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = ["--max-new-tokens", "24", "--out", str(out)]
    assert main(["generate", str(folder), "--chat", "--prompts", str(file), *given]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    ended = 0
    for row, answer in zip(ROWS, found, strict=True):
        prompt, text, stopped = wanted(folder, model, asked(row), row.get("tools"))
        assert answer == {
            **row,
            "text": text,
            "prompt_tokens": len(prompt),
            "new_tokens": answer["new_tokens"],
            "stopped": stopped,
        }
        ended += stopped
    assert ended > 0


def test_a_system_message_is_put_where_there_is_none(folder: Path, model: Any) -> None:
    rows = [(row, chats.chat_of(row, "x")) for row in ROWS[:2]]
    found = chats.answer_chats(folder, rows, HOW, system="Be long")
    first = [{"role": "system", "content": "Be long"}, *ROWS[0]["messages"]]
    assert found[0]["text"] == wanted(folder, model, first)[1]
    assert found[1]["text"] == wanted(folder, model, ROWS[1]["messages"])[1]


def test_a_question_is_answered_as_it_comes(
    folder: Path, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", str(folder), "--chat", "--prompt", "the cat", "--max-new-tokens", "24"])
    text = wanted(folder, model, ROWS[0]["messages"])[1]
    shown = "".join(char if char in "\n\t" else one_line(char) for char in text)
    assert capsys.readouterr().out == shown + "\n"


@pytest.mark.parametrize("last", ["/exit\nnever\n", ""])
def test_a_conversation_remembers_what_was_said(
    last: str, folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\n  \nand then?\n" + last))
    main(["generate", str(folder), "--chat", "--system", "Be brief", "--max-new-tokens", "24", "--json"])
    messages = json.loads(capsys.readouterr().out.splitlines()[-1])["messages"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [messages[1]["content"], messages[3]["content"]] == ["the cat", "and then?"]
    for end in (2, 4):
        assert messages[end]["content"] == wanted(folder, model, messages[:end])[1]


def test_answers_of_a_conversation_are_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\nsat\n"))
    main(["generate", str(folder), "--chat", "--max-new-tokens", "4"])
    assert len(capsys.readouterr().out.strip()) > 1


def copied(folder: Path, to: Path, **changed: str | None) -> Path:
    """The folder with other files; None leaves one out."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    for stem, text in changed.items():
        file = next(file for file in to.iterdir() if file.stem == stem)
        file.unlink()
        if text is not None:
            file.write_text(text)
    return to


def test_answers_end_at_the_templates_end_of_turn(folder: Path, model: Any, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 0}
    other = copied(
        folder,
        tmp_path / "other",
        config=json.dumps(config),
        generation_config=json.dumps({"eos_token_id": 0}),
    )
    rows = [(row, chats.chat_of(row, "x")) for row in ROWS]
    with pytest.warns(
        UserWarning, match=r"ends generations at <\|endoftext\|> by its configs, and turns at <\|im_end\|>"
    ):
        found = chats.answer_chats(other, rows, HOW)
    assert [row["text"] for row in found] == [
        wanted(folder, model, asked(row), row.get("tools"))[1] for row in ROWS
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chats.answer_chats(folder, rows[:1], HOW)


def test_no_first_token_is_put_before_a_rendered_chat(folder: Path, model: Any, tmp_path: Path) -> None:
    tree = json.loads((folder / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": SPECIAL[0], "type_id": 0}}
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {SPECIAL[0]: {"id": SPECIAL[0], "ids": [0], "tokens": [SPECIAL[0]]}},
    }
    other = copied(folder, tmp_path / "other", tokenizer=json.dumps(tree))
    assert transformers.AutoTokenizer.from_pretrained(other)("a").input_ids[0] == 0
    (found,) = chats.answer_chats(other, [(ROWS[0], chats.chat_of(ROWS[0], "x"))], HOW)
    prompt, text, _ = wanted(other, model, ROWS[0]["messages"])
    assert (found["prompt_tokens"], found["text"]) == (len(prompt), text)


WRONG: dict[str, tuple[list[str], str]] = {
    "a layout": (["--chat", "--layout.tp", "2"], "--chat: a conversation is held on one device"),
    "a system without a chat": (
        ["--prompt", "a", "--system", "x"],
        "--system: is the system message of a chat",
    ),
    "an output of a conversation": (["--chat", "--out", "x"], "--out: takes the continuations of --prompts"),
    "special tokens as text": (
        ["--chat", "--prompt", "a", "--special-tokens", "text"],
        "--special-tokens: with 'text'",
    ),
    "both": (["--chat", "--prompt", "a", "--prompts", "x"], "--prompt: is the text to continue"),
}


@pytest.mark.parametrize("name", WRONG)
def test_flags_that_do_not_go_together(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, words = WRONG[name]
    with pytest.raises(UserError, match=words):
        main(["generate", str(folder), *flags])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"text": "a"},
            r"the keys of line 1 of .* are text, which hold no chat; write objects such as \{\"messages\"",
        ),
        ({"messages": []}, r"line 1 of .* asks nothing; give a message"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, r"line 1 of .* asks nothing"),
        (
            {"messages": [{"role": "bot", "content": "a"}]},
            r"line 1 of .*key 'messages\[0\]\.role': it is \"bot\"",
        ),
        ("a", r"line 1 of .* is \"a\", not an object; write objects such as \{\"messages\""),
    ],
)
def test_rows_that_are_no_chats_are_told(row: Any, words: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=words):
        main(["generate", str(folder), "--chat", "--prompts", str(file)])


def test_a_folder_without_a_template_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--chat: .* has no chat template; give a folder with"):
        main(
            [
                "generate",
                str(copied(folder, tmp_path / "other", chat_template=None)),
                "--chat",
                "--prompt",
                "a",
            ]
        )


def test_a_run_answers_by_the_template_that_it_was_made_with(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    main(["import", str(folder), "--out", str(tmp_path / "run")])
    rows = [(row, chats.chat_of(row, "x")) for row in ROWS[:3]]
    found = chats.answer_chats(tmp_path / "run", rows, HOW, [("layout.tp", "2")])
    assert [row["text"] for row in found] == [wanted(folder, model, asked(row))[1] for row in ROWS[:3]]
