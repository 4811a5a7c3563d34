"""Models by the names that people know: repositories on the hub, and how they are written.

One rule finds the preset of a name. The organisation before a slash is left out, and so are words for what a
model was trained to do, its format and its date (`_LEFT_OUT`); case, dots, dashes and colons do not count.
What is left is compared with the names of the presets and of the repositories in `REPOSITORIES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from meshwright.spec.hf.config_read import HUB_ID
from meshwright.spec.near_names import did_you_mean_preset
from meshwright.spec.presets import PRESETS

REPOSITORIES: dict[str, tuple[str, ...]] = {
    "gpt2": ("openai-community/gpt2",),
    "gpt2-medium": ("openai-community/gpt2-medium",),
    "gpt2-large": ("openai-community/gpt2-large",),
    "gpt2-xl": ("openai-community/gpt2-xl",),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M",),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M",),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B",),
    "llama2-7b": ("meta-llama/Llama-2-7b-hf",),
    "llama2-13b": ("meta-llama/Llama-2-13b-hf",),
    "llama2-70b": ("meta-llama/Llama-2-70b-hf",),
    "llama3-8b": ("meta-llama/Meta-Llama-3-8B",),
    "llama3-70b": ("meta-llama/Meta-Llama-3-70B",),
    "llama3.1-8b": ("meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
    "llama3.1-70b": (
        "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.3-70B-Instruct",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    ),
    "llama3.1-405b": ("meta-llama/Llama-3.1-405B",),
    "llama3.2-1b": ("meta-llama/Llama-3.2-1B",),
    "llama3.2-3b": ("meta-llama/Llama-3.2-3B",),
    "tinyllama-1.1b": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0",),
    "smollm3-3b": ("HuggingFaceTB/SmolLM3-3B",),
    "mistral-7b-v0.1": ("mistralai/Mistral-7B-v0.1",),
    "mistral-7b-v0.2": ("mistralai/Mistral-7B-Instruct-v0.2",),
    "mistral-7b": ("mistralai/Mistral-7B-v0.3",),
    "mistral-nemo-12b": ("mistralai/Mistral-Nemo-Base-2407",),
    "mistral-small-24b": ("mistralai/Mistral-Small-24B-Base-2501",),
    "mistral-large-123b": ("mistralai/Mistral-Large-Instruct-2411",),
    "phi3-mini": ("microsoft/Phi-3-mini-4k-instruct",),
    "phi3-medium": ("microsoft/Phi-3-medium-4k-instruct",),
    "phi4": ("microsoft/phi-4",),
    "olmo2-1b": ("allenai/OLMo-2-0425-1B",),
    "olmo2-7b": ("allenai/OLMo-2-1124-7B",),
    "olmo2-13b": ("allenai/OLMo-2-1124-13B",),
    "olmo2-32b": ("allenai/OLMo-2-0325-32B",),
    "olmo3-7b": ("allenai/Olmo-3-1025-7B",),
    "olmo3-32b": ("allenai/Olmo-3-1125-32B", "allenai/Olmo-3.1-32B-Instruct"),
    "gemma2-2b": ("google/gemma-2-2b",),
    "gemma2-9b": ("google/gemma-2-9b",),
    "gemma2-27b": ("google/gemma-2-27b",),
    "gemma3-270m": ("google/gemma-3-270m",),
    "gemma3-1b": ("google/gemma-3-1b-pt",),
    "gemma3-4b": ("google/gemma-3-4b-pt",),
    "gemma3-12b": ("google/gemma-3-12b-pt",),
    "gemma3-27b": ("google/gemma-3-27b-pt",),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-Coder-0.5B"),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B",),
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-Coder-3B"),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-Coder-7B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    "qwen2.5-14b": ("Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-Coder-14B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"),
    "qwen2.5-32b": (
        "Qwen/Qwen2.5-32B", "Qwen/Qwen2.5-Coder-32B", "Qwen/QwQ-32B",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    ),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B",),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B",),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B",),
    "qwen3-4b": ("Qwen/Qwen3-4B",),
    "qwen3-8b": ("Qwen/Qwen3-8B",),
    "qwen3-14b": ("Qwen/Qwen3-14B",),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B",),
    "qwen3-coder-480b-a35b": ("Qwen/Qwen3-Coder-480B-A35B-Instruct",),
    "olmoe-1b-7b": ("allenai/OLMoE-1B-7B-0924",),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "glm4.5": ("zai-org/GLM-4.5", "zai-org/GLM-4.6"),
    "glm4.5-air": ("zai-org/GLM-4.5-Air",),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1",),
    "mixtral-8x22b": ("mistralai/Mixtral-8x22B-v0.1",),
    "deepseek-v2-lite": ("deepseek-ai/DeepSeek-V2-Lite",),
    "deepseek-v2": ("deepseek-ai/DeepSeek-V2",),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-R1",
    ),
    "moonlight-16b-a3b": ("moonshotai/Moonlight-16B-A3B",),
    "kimi-k2": ("moonshotai/Kimi-K2-Base", "moonshotai/Kimi-K2-Thinking"),
}  # fmt: skip
"""Published presets, and the repositories of models with as many layers, channels, heads and experts.

The first has the config.json that the preset equals; those of the others have other positions at most.
"""

_FORMATS = {"gguf", "awq", "gptq", "bnb", "4bit", "8bit", "int4", "int8"}
_LEFT_OUT = {
    "meta", "hf", "base", "pt", "it", "instruct", "chat", "think", "thinking", "bf16", "fp8", *_FORMATS,
}  # fmt: skip
_DATE = re.compile(r"\d{4}")
"""Year and month, or month and day, such as 2507 and 0324."""

_NOT_COMPUTED = {
    r"qwen-?3-?(coder-?)?next|qwen-?3\.[56]|kimi-?linear|minimax-?(m1|text)": "linear-attention layers "
    "(linear_attention of layer_types)",
    r"llama-?4": "attention in chunks (attention_chunk_size) with a temperature by position (attn_scale)",
    r"gemma-?3n": "embeddings of each layer (hidden_size_per_layer_input) and keys that layers share",
    r"deepseek-?v3\.2|glm-?5": "attention to the tokens that an indexer chooses (index_topk)",
    r"jamba|falcon-?h1|nemotron-?(h|3)|zamba|bamba|granite-?4|mamba": "state-space layers (mamba_d_state, or "
    "ssm_state_size)",
    r"lfm-?2": "convolution layers (conv_L_cache)",
}
"""Pattern of a name -> what models of that name have, which no field of a spec says, by its key."""

_LONG_ROPE = re.compile(r"phi-?4-?mini|phi-?3\.5|phi-?3-?(mini|small|medium)-?128k")
"""Models with a factor for each pair of channels."""


def preset_named(name: str) -> str | None:
    """Return the preset of a model's name, by the rule above; None if none has it.

    With an organisation it is the name of a published model: `runs/tiny` is a folder.
    """
    preset = name if name in PRESETS else _known().get(_plain(name))
    if "/" in name and not (HUB_ID.fullmatch(name) and preset in REPOSITORIES):
        return None
    return preset


def is_trainable(name: str) -> bool:
    """True for a repository on the hub whose name has no format that training cannot begin from."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return HUB_ID.fullmatch(name) is not None and "/" in name and not words & _FORMATS


def why_unknown(name: str, otherwise: str) -> str:
    """The reason why a name is no preset's: what its model has, or `otherwise` and presets that are near."""
    last = name.rpartition("/")[2].lower()
    for pattern, parts in _NOT_COMPUTED.items():
        if re.search(pattern, last):
            return f"has {parts}, which no key of model says, so it is neither planned nor trained"
    if _LONG_ROPE.search(last):
        return (
            "has a factor for each pair of channels (long_factor), for which there is no preset; give a "
            "folder that holds its config.json"
        )
    folder = "a folder that holds its config.json, or " if HUB_ID.fullmatch(name) else ""
    remedy = f"; give {folder}one of the presets that `meshwright spec presets` lists"
    return otherwise + (did_you_mean_preset(list(_words(name))) or remedy)


@cache
def _known() -> dict[str, str]:
    """The preset of each plain name."""
    found = {_plain(name): preset for preset, names in REPOSITORIES.items() for name in names}
    return {**found, **{_plain(preset): preset for preset in PRESETS}}


def _plain(name: str) -> str:
    """A model's name as names are compared: `Qwen/Qwen2.5-7B-Instruct` is qwen257b."""
    return "".join(_words(name)).replace(".", "")


def _words(name: str) -> Iterator[str]:
    """The words of a name that say which model it is."""
    for word in re.split(r"[^a-z0-9.]+", name.rpartition("/")[2].lower()):
        if word and word not in _LEFT_OUT and not _DATE.fullmatch(word):
            yield word
