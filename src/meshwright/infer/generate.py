"""Continuations of prompts, by a decoder on one device or on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.comm.collectives import sum_scalars
from meshwright.comm.waiting import while_others_wait
from meshwright.infer.batching import Batching, Request
from meshwright.infer.forward import DecoderPart, StageForward, no_token_dropped
from meshwright.infer.paged_cache import PageTable, pages_of
from meshwright.infer.sampling import Sampling
from meshwright.model.decoder import Decoder
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.layers import LongRope
from meshwright.spec.serving import PAGE_TOKENS

Tokens = TypeVar("Tokens", list[int], Tensor)
Show = Callable[[Request], None]
"""Is called after each new token of a request, which is the last of `request.new`."""


def generate(
    decoder: Decoder,
    tokens: Tokens,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    limit: int | None = None,
    lookup: int = 0,
) -> Tokens:
    """Continue `tokens`: a list gives the list of new tokens, (B, T) gives the new tokens (B, n).

    A row ends at any of `stop_ids`, which is not part of a list's result; in a batch, rows that have ended go
    on with the first of them; n is at most `max_new_tokens`. Only ids below `limit` are chosen. A turn reads
    at most `lookup` tokens ahead. Raises `UserError` for an empty prompt, and for tokens beyond the
    vocabulary or the positions.
    """
    rows = [tokens] if isinstance(tokens, list) else tokens.tolist()
    requests = [Request(number, row, max_new_tokens, stop_ids) for number, row in enumerate(rows)]
    for request in requests:
        check_request(decoder.spec, request)
    continue_requests(decoder, requests, sampling or Sampling(), limit, len(rows), lookup=lookup)
    if isinstance(tokens, list):
        return requests[0].text
    most = max((len(request.new) for request in requests), default=0)
    filled = [request.new + [*stop_ids, 0][:1] * (most - len(request.new)) for request in requests]
    return torch.tensor(filled, dtype=torch.int64).view(len(rows), most)


def continue_requests(
    decoder: Decoder,
    requests: Sequence[Request],
    sampling: Sampling,
    limit: int | None,
    most_rows: int,
    *,
    cache_tokens: int | None = None,
    lookup: int = 0,
    show: Show | None = None,
    part: DecoderPart | None = None,
) -> None:
    """Continue requests until all have ended, at most `most_rows` of them at a time.

    The caches hold `cache_tokens` tokens, by default those of the longest `most_rows` requests. A turn reads
    at most `lookup` tokens ahead, which earlier text suggests; they change no token. With `part` the decoder
    is this rank's, and the requests those of its data rank; all ranks of the mesh call this.
    """
    table = PageTable(_pages(requests, most_rows, cache_tokens))
    forward = StageForward(decoder, sampling, table.pages, limit, part)
    together: Callable[[bool], bool] = bool
    if part is not None and part.mesh.expert.size > 1:  # experts of other data ranks take part in each turn
        world = part.mesh.world

        def together(busy: bool) -> bool:
            return sum_scalars([float(busy)], world)[0] > 0

    def run() -> None:
        batching = Batching(forward, table, most_rows, cache_tokens is None, lookup)
        for request in batching.run(requests, together):
            if show is not None:
                show(request)

    with no_token_dropped(decoder):
        if part is None or part.mesh.layout.data_ranks == 1:
            run()
        else:  # one data rank may be done hours before another
            while_others_wait(part.mesh.control, True, run)


def _pages(requests: Sequence[Request], most_rows: int, cache_tokens: int | None) -> int:
    needed = sorted((pages_of(len(request.prompt) + request.most) for request in requests), reverse=True)
    pages = sum(needed[:most_rows])
    if cache_tokens is None or not needed:
        return pages
    if cache_tokens // PAGE_TOKENS < needed[0]:
        raise UserError(
            f"cache_tokens: {cache_tokens} cannot hold the longest prompt with its new tokens; give at "
            f"least {needed[0] * PAGE_TOKENS}, or fewer max_new_tokens"
        )
    return min(pages, cache_tokens // PAGE_TOKENS)


def check_request(
    spec: ModelSpec,
    request: Request,
    name: str = "the prompt",
    text_and_remedy: Callable[[int], tuple[str, str]] | None = None,
) -> None:
    """Raise `UserError` for a prompt, called `name`, that the model cannot continue by `request.most`
    tokens.

    `text_and_remedy` returns the text of a token that the model lacks, and what to do about it.
    """
    prompt, most = request.prompt, request.most
    if not prompt:
        raise UserError(f"generate: {name} has no tokens; give at least one (the document's END will do)")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < spec.vocab_size:
            text, remedy = text_and_remedy(token) if text_and_remedy else ("", "give ids below that")
            spelled = f" ({text!r})" if text else ""
            raise UserError(
                f"generate: {name} has token {token}{spelled}, which is outside of the model's vocabulary "
                f"of {spec.vocab_size}; {remedy}"
            )
    if most < 0:
        raise UserError(f"generate: max_new_tokens {most} is negative; give 0 or more")
    scaling, every = spec.rope_scaling, len(prompt) + most
    if isinstance(scaling, LongRope) and every > scaling.original_max_seq_len:
        raise UserError(
            f"generate: {name} has {len(prompt)} tokens, which with {most} new ones are more than the "
            f"{scaling.original_max_seq_len} up to which LongRoPE's short factors hold; give fewer, or "
            f"export the model to a server that computes keys again with the long ones"
        )
    room = spec.max_seq_len - len(prompt)
    if spec.position == "learned" and most > room:
        instead = f"at most {room} new ones, or a shorter one" if room > 0 else "a shorter one"
        raise UserError(
            f"generate: {name} has {len(prompt)} tokens, which with {most} new ones are more than the "
            f"model's {spec.max_seq_len} learned positions; give {instead}"
        )
