"""The memory of vLLM, which the printed commands serve with, and what of a GPU it may fill.

vLLM fills a share of a GPU, `gpu_memory_utilization`, with weights, with what a first forward takes at most,
with CUDA graphs, and with pages of keys and values, of which there must be enough for one sequence of
`max_model_len` (`determine_available_memory` and `request_memory` of vllm/v1/worker, release 0.32). That
forward reads `max_num_batched_tokens`, and then draws a token for each of `max_num_seqs` sequences. The
context of CUDA and the buffers of NCCL are older than its count of free memory, and so outside the share.
"""

from __future__ import annotations

from meshwright.planner.memory.generic import Memory
from meshwright.planner.rank_view import RankView, widths
from meshwright.spec import ModelSpec
from meshwright.spec.serving import MOST_PROMPT_TOKENS

UTILIZATION = 0.92
"""Share of a GPU's memory that it may fill: its default (vllm/config/cache.py, release 0.32)."""
_DRAW = 39
"""Bytes for each logit of a draw: in two formats, sorted with indices, and as probabilities and their sums.
Fitted on one row: 1.26 GiB for 256 sequences of Llama 3 8B (vllm-project/vllm pull request 10511, 2024)."""
GRAPHS = 0.35e9
"""Bytes of CUDA graphs. Its logs have 0.26 GiB (vllm-project/vllm pull request 30515) and 0.36 GiB
(gpustack/runner pull request 251); more sequences and larger models have more."""


def prompt_tokens(batch: int) -> int:
    """Tokens that one forward reads at most, `max_num_batched_tokens`: no fewer than the sequences."""
    return max(MOST_PROMPT_TOKENS, batch)


def vllm_room(memory: Memory, room: float) -> float:
    """Bytes of a GPU of `room` bytes that weights, caches, working memory and what is outside its share may
    take together."""
    return min(room, UTILIZATION * room + memory.context + memory.communicators)


def working(view: RankView, batch: int) -> float:
    """Bytes of its first forward beyond the weights, and of CUDA graphs."""
    model, tokens, width = view.spec.model, prompt_tokens(batch), widths(view.spec).compute
    forward = width * tokens * block_channels(model, view.spec.layout.tp, view.spec.layout.ep > 1)
    drawn = batch * model.vocab_size * _DRAW + width * tokens * model.hidden if view.head else 0
    return max(forward, drawn) + GRAPHS


def block_channels(model: ModelSpec, tp: int, expert_parallel: bool) -> float:
    """Numbers that the fullest block holds for a token: the residual stream and its norm, queries, keys and
    values, and what the feed-forward layer computes; all ranks hold all tokens of their experts."""
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    channels = (heads + 3 * model.ffn) / tp
    if (moe := model.moe) is not None:
        experts = 3 * moe.ffn * moe.top_k / (1 if expert_parallel else tp) + moe.top_k * model.hidden
        channels = max(channels, heads / tp + experts)
    return 4 * model.hidden + channels
