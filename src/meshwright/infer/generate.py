"""Generation with a key-value cache: greedy, or sampled at a temperature from the top k or the top p."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from meshwright.model.attention import KeyValueCache
from meshwright.model.decoder import Decoder
from meshwright.spec import ModelSpec, UserError

Tokens = TypeVar("Tokens", list[int], Tensor)


@torch.no_grad()
def generate(
    decoder: Decoder,
    tokens: Tokens,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_id: int | None = None,
    limit: int | None = None,
) -> Tokens:
    """Continue `tokens`: a list gives the list of new tokens, (B, T) gives the new tokens (B, n).

    Temperature 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature),
    after keeping the `top_k` likeliest and, of these, the fewest that hold `top_p` of the probability
    (Holtzman et al. 2020). The same seed gives the same tokens. A row ends at `stop_id`, which is not
    part of a list's result; in a batch, rows that have ended go on with `stop_id`; n is at most
    `max_new_tokens`. Only ids below `limit` are chosen: a tokenizer may know fewer than the model.

    Raises `UserError` for an empty prompt, tokens beyond the vocabulary, and sampling options out of range.
    """
    like = next(decoder.parameters())
    prompt_BT = torch.tensor([tokens], dtype=torch.int64) if isinstance(tokens, list) else tokens
    _check_prompt(decoder.spec, prompt_BT, max_new_tokens)
    _check_sampling(temperature, top_k, top_p, seed)
    batch, room = prompt_BT.shape[0], prompt_BT.shape[1] + max_new_tokens
    try:
        caches = [KeyValueCache(decoder.spec, batch, room, like) for _ in decoder.blocks]
    except RuntimeError as error:  # torch's way to say that there is no memory
        raise UserError(
            f"generate: no memory for the keys and values of {room} tokens; give fewer max_new_tokens "
            f"than {max_new_tokens}"
        ) from error
    generator = torch.Generator(device=like.device).manual_seed(seed)
    input_BT, new = prompt_BT.to(like.device), []
    ended_B = torch.zeros(batch, dtype=torch.bool, device=like.device)
    for _ in range(max_new_tokens):
        logits_BV = decoder(input_BT, caches=caches)[:, -1, :limit]
        next_B = _choose(logits_BV, temperature, top_k, top_p, generator)
        if stop_id is not None:
            next_B = torch.where(ended_B, stop_id, next_B)
            ended_B |= next_B == stop_id
        new.append(next_B)
        if stop_id is not None and bool(ended_B.all()):
            break
        input_BT = next_B.unsqueeze(1)
    if isinstance(tokens, list):
        row = [int(step[0]) for step in new]
        return row[:-1] if row and row[-1] == stop_id else row
    return torch.stack(new, 1) if new else prompt_BT.new_empty((batch, 0))


def _choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """Return one token id for each row (B,)."""
    if temperature == 0.0:
        return logits_BV.argmax(-1)
    scores = logits_BV.double() / temperature
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if top_p is not None:
        ordered, order = scores.softmax(-1).sort(descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the likeliest one always stays
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), float("-inf"))
    return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(1)


def _check_prompt(spec: ModelSpec, prompt_BT: Tensor, max_new_tokens: int) -> None:
    if prompt_BT.dim() != 2 or not prompt_BT.numel():
        raise UserError("generate: the prompt has no tokens; give at least one (the document's END will do)")
    for token in (int(prompt_BT.min()), int(prompt_BT.max())):
        if not 0 <= token < spec.vocab_size:
            raise UserError(
                f"generate: token {token} is outside of the model's vocabulary of {spec.vocab_size}"
            )
    if max_new_tokens < 0:
        raise UserError(f"generate: max_new_tokens {max_new_tokens} is negative; give 0 or more")
    room = spec.max_seq_len - prompt_BT.shape[1]
    if spec.position == "learned" and max_new_tokens > room:
        raise UserError(
            f"generate: {prompt_BT.shape[1]} prompt tokens and {max_new_tokens} new ones are more than the "
            f"model's {spec.max_seq_len} learned positions; give at most {max(room, 0)} new ones"
        )


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None, seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise UserError(f"generate: seed {seed} is out of range; give 0 or more, below 2**63")
    if not 0.0 <= temperature < float("inf"):
        raise UserError(f"generate: temperature {temperature} is out of range; give 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"generate: top_k {top_k} keeps no token; give 1 or more")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise UserError(f"generate: top_p {top_p} is out of range; give more than 0 and at most 1")
