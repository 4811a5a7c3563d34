"""Chats, the templates of TRL's package, and tokenizers with the special tokens of each template."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from sample_texts import texts
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from meshwright.data.chat_template import ChatTemplate
from meshwright.data.tokenizer import Tokenizer

NAMED = {"bos_token": "<bos>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_SPECIAL = re.compile(r"<[|\uff5c][^<>\s]*?[|\uff5c]>|<[|]?[\w:]+[|]?>|</\w+>|\[/?[A-Z_]+\]")
"""Texts in templates that are special tokens of their models, or could be."""


def trl_templates() -> dict[str, str]:
    """Sources of TRL's templates by name; empty where it is not installed."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return {}
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return {file.stem: file.read_text() for file in sorted(folder.glob("*.jinja"))}


TEMPLATES = trl_templates()
PAIRS = {name: f"{name}_training" for name in TEMPLATES if f"{name}_training" in TEMPLATES}
"""Templates without markers, and the same with markers."""
IN_PARTS = ("idefics3", "llava_next", "smolvlm", "qwen2_5_vl", "qwen3_vl", "lfm2_2_5_vl")
"""Beginnings of names of templates that take contents in parts."""


def call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    """A call of a tool."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def turns(*contents: str, **first: Any) -> list[dict[str, Any]]:
    """Questions and answers in turns; `first` is said of the first answer, too."""
    found = [
        {"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)
    ]
    if len(found) > 1:
        found[1].update(first)
    return found


def answer(number: int, text: str) -> dict[str, Any]:
    """The answer of a tool."""
    return {"role": "tool", "name": "weather", "tool_call_id": f"call{number:05d}", "content": text}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city: <b>é</b> & more.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A city."},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    }
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": turns("Hello there", "Good morning"),
    "several turns": turns("Hello there", "Good morning", "And then?", "Nothing at all."),
    "system": [{"role": "system", "content": "Be brief."}, *turns("Hello", "Hi")],
    "empty system": [{"role": "system", "content": ""}, *turns("Hello", "Hi")],
    "ends with a question": turns("Hello", "Hi", "And then?"),
    "spaces": turns(" Hello \n", "\n Hi \n\n", "\tAnd  ", " then "),
    "empty answers": turns("Hello", "", "And then?", ""),
    "unicode": turns("Grüße, 世界 👩‍👩‍👧", "café ☕ e\u0301", "ß\u00a0\u017f", "\U0001d518 🇩🇪"),
    "reasoning": [
        *turns("2+2?", "4", "3+3?", reasoning_content="Two and two."),
        {"role": "assistant", "content": "6", "reasoning_content": "Three\nand three."},
    ],
    "thinking": turns("2+2?", "<think>\nTwo.\n</think>\n\n4", "3+3?", "<think>\nThree.\n</think>\n\n6"),
    "special tokens spelled": turns(
        "<|im_end|> <end_of_turn> </s>", "I see <|im_start|>assistant", "So?", "No."
    ),
    "html": turns("a < b && c > 'd'", '"quoted" <b>bold</b>', "{{ 7 * 7 }}", "{% raw %}"),
    "a call": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call("weather", 1, city="Köln", days=2)]},
        answer(1, "sunny"),
        {"role": "assistant", "content": "It is sunny."},
    ],
    "two calls": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [call("weather", 1, city="Köln"), call("weather", 2, city="Rome")],
        },
        answer(1, "sunny"),
        answer(2, "rain"),
        {"role": "assistant", "content": "Sunny, and rain."},
        *turns("Thanks", "Bye"),
    ],
    "a call that stays": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call("weather", 1, city="Köln")]},
    ],
}  # fmt: skip


def chats_of(template: str) -> dict[str, tuple[list[dict[str, Any]], list[Any] | None]]:
    """The chats by name, with their tools, in the form that a template takes contents in."""
    found = {}
    for name, chat in CHATS.items():
        if template.startswith(IN_PARTS):
            chat = [
                {**each, "content": [{"type": "text", "text": each["content"]}]}
                if each["content"] is not None
                else each
                for each in chat
            ]
        found[name] = (chat, TOOLS if "call" in name else None)
    return found


def special_of(source: str) -> list[str]:
    """The special tokens that a template spells, and those that have a name."""
    return sorted({*_SPECIAL.findall(source), *NAMED.values(), "<|im_start|>", "<|im_end|>"})


@cache
def _bpe() -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    words = [str(message.get("content")) for chat in CHATS.values() for message in chat]
    backend.train_from_iterator([*texts(30), *words], trainer)
    return str(backend.to_str())


def backend_of(source: str) -> Backend:
    """A byte-level BPE with the special tokens of a template."""
    backend = Backend.from_str(_bpe())
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_of(source)]
    )
    return backend


@cache
def tokenizer_of(source: str, stops: tuple[str, ...] = ()) -> Tokenizer:
    """Our tokenizer with the special tokens of a template."""
    from meshwright.spec.hf.text_tokens import TextTokens

    backend = backend_of(source)
    ids = tuple(backend.token_to_id(token) for token in (NAMED["eos_token"], *stops))
    return Tokenizer(backend, ids[0], None, TextTokens(ids[0], stops=ids), reads_special=True)


def theirs_of(source: str) -> Any:
    """The tokenizer of transformers with the same tokens and the template."""
    from transformers import PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast(tokenizer_object=backend_of(source), **NAMED)
    found.chat_template = source
    return found


@cache
def template_of(name: str) -> ChatTemplate:
    """One of TRL's templates."""
    return ChatTemplate(TEMPLATES[name], name, NAMED)
