"""Programs of llama.cpp, in its wheel for CPUs, on GGUF files that tests wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

_TRIES = 40


class LlamaCpp:
    """llama.cpp's server on a GGUF file, in fp32."""

    def __init__(self, file: Path, length: int = 64) -> None:
        library = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
        params = library.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = length, 1, False, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = library.ggml_type.GGML_TYPE_F32
        # Its flash attention on CPUs rounds keys to fp16.
        params.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = library.Server(params)

    def log_probs(self, prompt: Sequence[int] | str, vocab_size: int) -> Tensor:
        """Log-probabilities of the token after these tokens, or after a text, (vocab_size,)."""
        asked = {"prompt": prompt, "n_predict": 1, "n_probs": vocab_size, "temperature": 1.0,
                 "samplers": [], "ignore_eos": True, "cache_prompt": False}  # fmt: skip
        for seed in range(_TRIES):  # it tells nothing of a token that is a part of a character
            told = self._complete(asked | {"seed": seed})
            if (logprobs := told["choices"][0]["logprobs"]) is not None:
                found = torch.full((vocab_size,), -torch.inf)
                for each in logprobs["content"][0]["top_logprobs"]:
                    found[each["id"]] = each["logprob"]
                return found
        raise AssertionError(f"no token of {_TRIES} is a whole character")

    def continued(self, text: str, count: int) -> str:
        """Return the greedy continuation of a text by `count` tokens."""
        told = self._complete({"prompt": text, "n_predict": count, "temperature": 0.0, "ignore_eos": True})
        return str(told["choices"][0]["text"])

    def _complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        told: dict[str, Any] = self._server.handle_completions(asked)
        assert "choices" in told, told
        return told
