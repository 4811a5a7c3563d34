"""Token ids and masks of chats beside transformers and TRL's SFTTrainer on the same rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_cases import NAMED, TEMPLATES, TOOLS, chats_of, theirs_of, tokenizer_of, turns

from meshwright.data.chat_formats import Conversation, conversation_of
from meshwright.data.chat_template import ChatTemplate
from meshwright.data.chat_tokens import ChatEncoder, ChatTokens, tokens_in
from meshwright.spec import UserError

pytest.importorskip("transformers", reason="transformers is not installed")
MARKED = [name for name in TEMPLATES if name.endswith("_training") or name.startswith("lfm2_2_5")]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encoder_of(source: str, name: str = "template") -> ChatEncoder:
    return ChatEncoder(tokenizer_of(source), ChatTemplate(source, name, NAMED))


def encoded(source: str, row: dict[str, Any], format: Any = "chat") -> ChatTokens:
    return encoder_of(source).encode(conversation_of(row, format))


@pytest.mark.parametrize("name", MARKED)
def test_ids_and_marked_tokens_are_those_of_transformers(name: str) -> None:
    source = TEMPLATES[name]
    theirs, ours, trained = theirs_of(source), encoder_of(source), 0
    for chat, tools in chats_of(name).values():
        try:
            wanted = theirs.apply_chat_template(
                chat, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception:
            continue
        found = ours.encode(Conversation(tuple(chat), tools))
        assert found.ids.tolist() == wanted["input_ids"]
        mask = [bool(bit) for bit in wanted["assistant_masks"]]
        for place in np.flatnonzero(found.trained != mask):  # of a letter they train on the first token alone
            assert wanted.char_to_token(wanted.token_to_chars(place).start) < place
            assert found.trained[place] == found.trained[place - 1]
            mask[place] = True
        assert found.trained.tolist() == mask
        assert found.trained_tokens == sum(mask) > 0
        trained += 1
    assert trained >= 8


def test_a_row_without_an_answer_has_nothing_to_train_on() -> None:
    assert encoded(CHATML, {"messages": turns("a")}).trained_tokens == 0


def test_a_letter_of_several_tokens_is_trained_on_whole() -> None:
    source = "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}."
    tokenizer = tokenizer_of(source)
    text, rest = tokenizer.encode("a"), tokenizer.encode("\u2744")
    assert len(rest) == 3
    found = encoded(source, {"messages": turns("a", "\u2744")})
    assert found.ids.tolist() == [*text, *rest, *tokenizer.encode(".")]
    assert found.trained.tolist() == [False, True, True, True, False]


def test_tokens_in_spans() -> None:
    offsets = np.array([[0, 2], [2, 3], [3, 6], [6, 6], [6, 9]])
    assert tokens_in([(2, 4)], offsets).tolist() == [False, True, True, False, False]
    assert tokens_in([(0, 0), (6, 7)], offsets).tolist() == [False, False, False, False, True]
    assert not tokens_in([], offsets).any()


@pytest.mark.parametrize("format", ["chat", "prompt"])
def test_tools_and_variables_of_a_row_reach_the_template(format: Any) -> None:
    source = (
        "{{ tools | length }}{{ mood }}{{ eos_token }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    )
    given = {
        "tools": '[{"name": "x"}, {"name": "y"}]',
        "chat_template_kwargs": {"mood": "glad", "eos_token": "E"},
    }
    messages = turns("a", "b")
    row = {"messages": messages, "prompt": messages[:1], "completion": messages[1:], **given}
    found = encoded(source, row, format)
    assert tokenizer_of(source).decode(found.ids.tolist()) == "2gladEa</s>b</s>"
    assert found.trained_tokens == len(tokenizer_of(source).encode("b</s>"))


PROMPTS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "2+2=", "completion": " 4"},
    "a word across the border": {"prompt": "I am hap", "completion": "py today"},
    "an end that is there": {"prompt": "2+2=", "completion": " 4</s>"},
    "special tokens": {"prompt": "<|im_start|>user", "completion": "<|im_end|> x"},
    "an empty completion": {"prompt": "a", "completion": ""},
    "messages": {"prompt": turns("Hi"), "completion": turns("", "Yo")[1:]},
    "several turns": {"prompt": turns("Hi", "Yo", "And?"), "completion": turns("", "So.", "Well", "Bye")[1:]},
    "tools": {"prompt": turns("Hi"), "completion": turns("", "Yo")[1:], "tools": TOOLS},
    "variables": {
        "prompt": turns("Hi"),
        "completion": turns("", "Yo")[1:],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that makes TRL's trainer of rows and a tokenizer, and returns the rows that it trains on."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    def rows(given: list[dict[str, Any]], tokenizer: Any, **options: Any) -> list[dict[str, Any]]:
        small = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
        settings = trl.SFTConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            report_to=[],
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            max_length=None,
            **options,
        )
        made = trl.SFTTrainer(
            LlamaForCausalLM(small),
            settings,
            train_dataset=Dataset.from_list(given),
            processing_class=tokenizer,
        )
        return list(made.train_dataset)

    return rows


def as_theirs(found: ChatTokens) -> dict[str, Any]:
    labels = np.where(found.trained, found.ids.astype(np.int64), -100)
    return {"input_ids": found.ids.tolist(), "labels": labels.tolist()}


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "phi3", "llama3", "gemma"])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_those_of_trls_trainer(name: str, template: str, trainer: Any) -> None:
    if template != "qwen3" and isinstance(PROMPTS[name]["prompt"], str):
        pytest.skip("texts need no template")
    source = TEMPLATES[template]
    (wanted,) = trainer([PROMPTS[name]], theirs_of(source))
    found = encoded(source, PROMPTS[name], "prompt")
    assert as_theirs(found) == {key: wanted[key] for key in ("input_ids", "labels")}


def test_a_first_token_is_put_before_a_prompt_of_text(trainer: Any) -> None:
    from tokenizers import processors

    from meshwright.data.tokenizer import Tokenizer
    from meshwright.spec.hf.text_tokens import TextTokens

    theirs, plain = theirs_of(""), tokenizer_of("")
    begin = theirs.bos_token_id
    theirs._tokenizer.post_processor = processors.TemplateProcessing(
        "<bos> $A", special_tokens=[("<bos>", begin)]
    )
    (wanted,) = trainer([PROMPTS["texts"]], theirs)
    ours = Tokenizer(
        plain._backend, plain.end_id, None, TextTokens(plain.end_id, (begin,)), reads_special=True
    )
    found = ChatEncoder(ours, None).encode(conversation_of(PROMPTS["texts"], "prompt"))
    assert found.ids[0] == begin
    assert as_theirs(found) == {key: wanted[key] for key in ("input_ids", "labels")}


def test_answers_alone_are_trained_on_as_in_trls_trainer(trainer: Any) -> None:
    rows = [{"messages": turns("Hi", "Yo", "And?", "So.")}, {"messages": turns("A", "B")}]
    wanted = trainer(rows, theirs_of(CHATML), assistant_only_loss=True)
    for row, theirs in zip(rows, wanted, strict=True):
        assert as_theirs(encoded(CHATML, row)) == {key: theirs[key] for key in ("input_ids", "labels")}


def test_prompts_that_change_before_their_completions_are_counted() -> None:
    encoder = encoder_of(TEMPLATES["qwen3_5_think"] if TEMPLATES else CHATML)
    if not TEMPLATES:
        pytest.skip("trl is not installed")
    row = {
        "prompt": turns("Hi"),
        "completion": [{"role": "assistant", "content": "x", "reasoning_content": "y"}],
    }
    encoder.encode(conversation_of(row, "prompt"))
    assert encoder.changed_prompts == 0
    plain = (
        "{% for m in messages %}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}prompt{% endif %}"
    )
    encoder = encoder_of(plain)
    encoder.encode(conversation_of(PROMPTS["messages"], "prompt"))
    encoder.encode(conversation_of(PROMPTS["messages"], "prompt"))
    assert encoder.changed_prompts == 2


def test_chats_that_end_with_no_added_token_are_counted() -> None:
    encoder = encoder_of("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    encoder.encode(conversation_of({"messages": turns("a", "b")}, "chat"))
    assert encoder.unended == 1
    encoder = encoder_of(CHATML.replace("<|im_end|>{% endgen", "<|im_end|> \n{% endgen"))
    encoder.encode(conversation_of({"messages": turns("a", "b")}, "chat"))
    assert encoder.unended == 0


def test_a_tokenizer_that_splits_special_tokens_is_refused() -> None:
    tokenizer = tokenizer_of.__wrapped__("")
    tokenizer.reads_special = False
    with pytest.raises(ValueError, match="reads_special"):
        ChatEncoder(tokenizer, None)


def test_messages_without_a_template_are_told() -> None:
    with pytest.raises(UserError, match=r"has no chat template, and messages need one; .* \(f line 3\)$"):
        ChatEncoder(tokenizer_of(""), None).encode(
            conversation_of({"messages": turns("a")}, "chat", "f line 3")
        )


def test_markers_around_nothing_are_told() -> None:
    source = "{% generation %}{% endgeneration %}{{ messages[1].content }}"
    with pytest.raises(UserError, match=re.escape("puts none of the assistant's words between")):
        encoded(source, {"messages": turns("a", "b")})


def test_a_template_that_refuses_is_told_with_the_rows_place() -> None:
    with pytest.raises(UserError, match=r"^template does not render this chat \(Only one\) \(f line 3\)$"):
        encoder_of("{{ raise_exception('Only one') }}").encode(
            conversation_of({"messages": turns("a")}, "chat", "f line 3")
        )


def test_all_chats_of_an_encoder_tell_one_date() -> None:
    template = ChatTemplate("{{ strftime_now('%f') }}</s>")
    assert template.tells_time
    encoder = ChatEncoder(tokenizer_of(""), template)
    found = {tuple(encoder.encode(Conversation(tuple(turns("a")))).ids) for _ in range(3)}
    assert len(found) == 1


def test_a_folders_tokenizer_and_template(tmp_path: Path) -> None:
    from meshwright.data.tokenizer import Tokenizer

    theirs = theirs_of(CHATML)
    theirs.save_pretrained(tmp_path)
    encoder = ChatEncoder(Tokenizer.open(tmp_path, reads_special=True), ChatTemplate.open(tmp_path, "k"))
    chat = turns("Hi", "Yo")
    wanted = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    found = encoder.encode(Conversation(tuple(chat)))
    assert (found.ids.tolist(), found.trained.astype(int).tolist()) == (
        wanted["input_ids"],
        wanted["assistant_masks"],
    )
