"""Tokens that are trained on of chats whose template has no markers, beside the same with markers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from chat_cases import NAMED, PAIRS, TEMPLATES, TOOLS, chats_of, template_of, tokenizer_of, turns

from covering import some
from meshwright.data.chat_formats import Conversation
from meshwright.data.chat_template import ChatTemplate
from meshwright.data.chat_tokens import ChatEncoder, ChatTokens
from meshwright.spec import UserError

CUES = {
    "deepseek_r1_distill": "<\uff5cAssistant\uff5c>|<\uff5ctool\u2581outputs\u2581end\uff5c>",
    "deepseekv3": "<\uff5cAssistant\uff5c>|<\uff5ctool\u2581outputs\u2581end\uff5c>",
    "gptoss": r"<\|start\|>assistant",
    "muse_glimmer": r"<\|start\|>assistant",
    "qwen2_5": "\n",
}
"""Templates whose markers are around the prompt for generation, too, or a part of it, which is not trained on
here: a pattern of this part."""
MARKERS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def encode(name: str, chat: list[dict[str, Any]], tools: Any, beside: str = "") -> ChatTokens:
    """Tokens by a template, with the special tokens of this one and of `beside`."""
    stops = ("<|user|>", "<|observation|>") if "glm" in name else ()
    tokenizer = tokenizer_of(TEMPLATES[name] + TEMPLATES.get(beside, ""), stops)
    return ChatEncoder(tokenizer, template_of(name)).encode(Conversation(tuple(chat), tools))


def is_rendered(template: ChatTemplate, chat: Any, tools: Any) -> str | None:
    try:
        return template.render(chat, tools)
    except UserError:
        return None


@pytest.mark.parametrize("name", some(PAIRS, [*PAIRS][::3]))
def test_what_is_told_is_what_markers_say(name: str) -> None:
    marked, compared = PAIRS[name], 0
    for chat, tools in chats_of(name).values():
        text = is_rendered(template_of(name), chat, tools)
        if text is None or is_rendered(template_of(marked), chat, tools) != text:
            continue
        wanted = encode(marked, chat, tools, name)
        try:
            found = encode(name, chat, tools, marked)
        except UserError as error:
            assert refused(name, chat), error
            continue
        assert found.ids.tolist() == wanted.ids.tolist()
        tokens = tokenizer_of(TEMPLATES[name] + TEMPLATES[marked])
        if name in CUES:  # what else they mark is the end of the prompt for generation, in front of a turn
            more = np.flatnonzero(wanted.trained & ~found.trained)
            assert len(more)
            parts = np.split(more, np.flatnonzero(np.diff(more) > 1) + 1)
            for part in parts:
                assert re.fullmatch(CUES[name], tokens.decode(wanted.ids[part].tolist()))
                assert found.trained[part[-1] + 1]
            assert not (found.trained & ~wanted.trained).any()
        elif name == "diffusion_gemma" and tools:  # what asks for a tool's answer is trained on here, too
            more = wanted.ids[found.trained & ~wanted.trained].tolist()
            assert tokens.decode(more) in ("", "<|tool_response>")
            assert not (wanted.trained & ~found.trained).any()
        else:
            assert found.trained.tolist() == wanted.trained.tolist()
        compared += 1
    assert compared >= (1 if name.startswith("qwen3_5") or name in ("qwen3", "qwen3_6", "glm4moe") else 6)


def refused(name: str, chat: list[dict[str, Any]]) -> bool:
    """True for chats of which a template leaves out messages, or puts a tool's answer into a turn."""
    tool = any(message["role"] == "tool" for message in chat)
    return tool and name in ("phi3", "phi3_5", "diffusion_gemma")


MARKED = [name for name in TEMPLATES if MARKERS.search(TEMPLATES[name])]


@pytest.mark.parametrize("name", some(MARKED, MARKED[::3]))
def test_without_its_markers_a_template_tells_the_same(name: str) -> None:
    """Each template with markers, and what is left of it without them."""
    bare = MARKERS.sub(
        lambda found: found[0].replace(f"{found[1] or ''}generation", (found[1] and "endif") or "if true"),
        TEMPLATES[name],
    )
    template = ChatTemplate(bare, name, NAMED)
    assert not template.has_markers
    compared = 0
    for chat, tools in chats_of(name).values():
        text = is_rendered(template_of(name), chat, tools)
        if text is None or is_rendered(template, chat, tools) != text:
            continue
        tokenizer = tokenizer_of(TEMPLATES[name], ("<|user|>", "<|observation|>") if "glm" in name else ())
        wanted = ChatEncoder(tokenizer, template_of(name)).encode(Conversation(tuple(chat), tools))
        try:
            found = ChatEncoder(tokenizer, template).encode(Conversation(tuple(chat), tools))
        except UserError as error:
            assert refused(name.removesuffix("_training"), chat), error
            continue
        base = name.removesuffix("_training")
        if base not in CUES and not (base == "diffusion_gemma" and tools):
            assert found.trained.tolist() == wanted.trained.tolist()
        compared += 1
    assert compared >= 6


# Templates of our own, for what may go wrong.

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}"
CUE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OWN: dict[str, tuple[str, list[str]]] = {
    "plain": (HEAD + "{{ m.content }}" + TAIL + CUE, ["Hi <|im_end|>\n", "\n So\n\n<|im_end|>\n"]),
    "strips": (HEAD + "{{ m.content | trim }}" + TAIL + CUE, ["Hi<|im_end|>\n", "So<|im_end|>\n"]),
    "no prompt for generation": (
        HEAD + "{{ m.content }}" + TAIL,
        ["<|im_start|>assistant\nHi <|im_end|>\n", "<|im_start|>assistant\n\n So\n\n<|im_end|>\n"],
    ),
    "a prompt that goes on": (
        HEAD + "{{ m.content }}" + TAIL + CUE.replace("{% endif", "<think>\n{% endif"),
        ["Hi <|im_end|>\n", "\n So\n\n<|im_end|>\n"],
    ),
    "drops earlier thinking": (
        HEAD
        + "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.thinking }}\n</think>\n{% endif %}"
        "{{ m.content }}" + TAIL + CUE,
        ["Hi <|im_end|>\n", "<think>\nWhy\n</think>\n\n So\n\n<|im_end|>\n"],
    ),
    "another end for the last": (
        HEAD + "{{ m.content }}{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}</s>"
        "{% else %}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}" + CUE,
        ["Hi <|im_end|>\n", "\n So\n\n</s>\n"],
    ),
    "an end of the whole": (
        HEAD + "{{ m.content }}" + TAIL + CUE.replace("{% endif", "{% else %}</s>{% endif"),
        ["Hi <|im_end|>\n", "\n So\n\n<|im_end|>\n</s>"],
    ),
    "a line end between turns": (
        HEAD + "{{ m.content }}<|im_end|>{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}"
        "{% endfor %}" + CUE,
        ["Hi <|im_end|>", "\n So\n\n<|im_end|>"],
    ),
    "a line end behind the last turn": (
        HEAD + "{{ m.content }}<|im_end|>{% endfor %}"
        + CUE.replace("{% endif", "{% else %}{{ '\n' }}{% endif"),
        ["Hi <|im_end|>", "\n So\n\n<|im_end|>\n"],
    ),
    "answers twice": (
        "{% for m in messages %}{{ m.content }}/{{ m.content }}|{% endfor %}",
        ["Hi /Hi |", "\n So\n\n/\n So\n\n|"],
    ),
    "spaces between turns": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
        "{{ m.content }}</s> {% endif %}{% endfor %}",
        [" Hi </s>", " \n So\n\n</s>"],
    ),
    "words, not tokens": (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        [" Hi \n", " \n So\n\n\n"],
    ),
    "nothing ends a turn": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ["Hi <|user|>", "\n So\n\n"],
    ),
    "a date": (
        "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}" + HEAD + "{{ m.content }}" + TAIL + CUE,
        ["Hi <|im_end|>\n", "\n So\n\n<|im_end|>\n"],
    ),
    "a count of turns": (
        "{{ messages | length }}" + HEAD + "{{ loop.index }}. {{ m.content }}" + TAIL + CUE,
        ["2. Hi <|im_end|>\n", "4. \n So\n\n<|im_end|>\n"],
    ),
}  # fmt: skip


def own_chat() -> list[dict[str, Any]]:
    chat = turns("Hello", "Hi ", "<|im_start|>assistant\nAnd?", "\n So\n\n")
    return [*chat[:-1], {**chat[-1], "reasoning_content": "Why"}]


def trained_texts(source: str, chat: list[dict[str, Any]], tools: Any = None) -> list[str]:
    """The texts of each run of trained tokens."""
    tokenizer = tokenizer_of(source + "<|user|><|assistant|>", ("<|user|>",))
    found = ChatEncoder(tokenizer, ChatTemplate(source, "own", NAMED)).encode(
        Conversation(tuple(chat), tools)
    )
    edges = np.flatnonzero(np.diff(found.trained, prepend=False, append=False))
    return [
        tokenizer.decode(found.ids[start:end].tolist())
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


@pytest.mark.parametrize("name", OWN)
def test_turns_of_own_templates(name: str) -> None:
    source, wanted = OWN[name]
    assert trained_texts(source, own_chat()) == wanted


def test_turns_that_repeat_other_words_are_told_apart() -> None:
    chat = turns("same", "same", "same", "same", "<|im_end|>\n<|im_start|>assistant\nsame", "same")
    assert trained_texts(OWN["plain"][0], chat) == ["same<|im_end|>\n"] * 3


def test_two_answers_one_after_the_other() -> None:
    chat = [*turns("a", "b"), {"role": "assistant", "content": "c"}, *turns("d", "e")]
    assert trained_texts(OWN["plain"][0], chat) == ["b<|im_end|>\n", "c<|im_end|>\n", "e<|im_end|>\n"]


def test_an_answer_may_come_first() -> None:
    assert trained_texts(OWN["plain"][0], [turns("", "Welcome")[1], *turns("a", "b")]) == [
        "Welcome<|im_end|>\n",
        "b<|im_end|>\n",
    ]


UNSURE: dict[str, tuple[str, str]] = {
    "leaves out answers": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}|{% endif %}{% endfor %}",
        r"message 2 of 4, assistant: the template does not render it",
    ),
    "ends the last of anybody otherwise": (
        HEAD + "{{ m.content }}{% if loop.last and not add_generation_prompt %}</s>{% else %}<|im_end|>"
        "{% endif %}{% endfor %}" + CUE,
        r"message 2 of 4, assistant: it ends with \['</s>'",
    ),
    "tells lengths": (
        "{% for m in messages %}{{ m.content }} ({{ m.content | length }})|{% endfor %}",
        r"a word more in it changes other parts of the text",
    ),
    "tells lengths in front": (
        "{% for m in messages %}({{ m.content | length }}) {{ m.content }}|{% endfor %}",
        r"a word more in it changes other parts of the text",
    ),
    "begins unlike its prompt": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
        "{% if add_generation_prompt %}Bot>{% endif %}",
        r"the turn begins with 'assistant: ', and prompts with 'Bot>'",
    ),
    "ends unlike itself": (
        "{% for m in messages %}{{ m.content }}{% if loop.last %}END{% else %}({{ loop.revindex }})"
        "{% endif %}{% endfor %}",
        r"it ends with \['END'\] alone, and here '\(3\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSURE)
def test_what_cannot_be_told_is_an_error_with_template_and_turn(name: str) -> None:
    source, words = UNSURE[name]
    with pytest.raises(UserError, match=f"^own has no generation markers, .*(?:{words})"):
        trained_texts(source, turns("Hello", "Hi", "And?", "So"))


def test_a_call_that_stays_without_an_answer_ends_its_turn() -> None:
    source = (
        HEAD + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>"
        "{% endfor %}" + TAIL + CUE
    )
    chat, tools = chats_of("own")["two calls"]
    found = trained_texts(source, chat, tools)
    assert found[0].startswith(
        'Let me see.<call>{"name": "weather", "arguments": {"city": "Köln"}}</call><call>'
    )
    assert [each[-11:] for each in found] == ["<|im_end|>\n"] * 3 and tools == TOOLS
