"""Keys and values of many sequences in pages of one size (Kwon et al. 2023, PagedAttention).

A sequence takes a page when it has filled the last one, so that sequences of any lengths share the memory
without gaps. Attention reads a copy of the pages of a batch, in order, or the pages themselves where those of
each row follow each other and the rows are evenly spaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.model.attention_gqa import Attention
from meshwright.model.attention_mla import LatentAttention
from meshwright.spec.serving import PAGE_TOKENS, RESERVED_PAGES

NOTHING, SCRATCH = range(RESERVED_PAGES)
"""Pages of no sequence: zeros, read where a row of a batch has no token; and what no one reads."""


class PageTable:
    """Which pages are free."""

    def __init__(self, pages: int) -> None:
        """`pages` are those that sequences can have."""
        self.pages = RESERVED_PAGES + pages
        self._unused, self._free = RESERVED_PAGES, list[int]()
        """The first of the pages that no sequence has had yet, and those that were given back."""

    def grow(self, own: list[int], tokens: int) -> bool:
        """Add pages to a sequence's `own`, so that `tokens` fit; False, and nothing, if too few are free."""
        missing = max(0, pages_of(tokens) - len(own))
        fresh = max(0, missing - len(self._free))
        if self._unused + fresh > self.pages:
            return False
        own += [self._free.pop() for _ in range(missing - fresh)]
        own += range(self._unused, self._unused + fresh)
        self._unused += fresh
        return True

    def release(self, own: list[int]) -> None:
        """Free all pages of a sequence."""
        self._free += reversed(own)
        own.clear()


def pages_of(tokens: int) -> int:
    """Number of pages that hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class Run:
    """The `count` slots from `first` on, and as many for each next of `rows` rows, `apart` slots after."""

    first: int
    rows: int
    apart: int
    count: int

    def view(self, buffer: Tensor) -> Tensor:
        """The slots (rows, count, ...) of a buffer (slots, ...), without a copy."""
        each = buffer.stride()
        shape = (self.rows, self.count, *buffer.shape[1:])
        return buffer.as_strided(shape, (self.apart * each[0], *each), self.first * each[0])


@dataclass(frozen=True)
class Places:
    """Where the B x T tokens of one forward go, and what they attend to.

    Slots are places of a token in all pages, page by page. `read` holds those of the S tokens that rows may
    attend to, (B, S) or a `Run`, or is None if these are the tokens of the forward themselves. `seen` is the
    most tokens that a row had before.
    """

    write: Tensor | Run
    read: Tensor | Run | None
    seen: int
    keys: int
    """S, also where `read` is None."""


def places(rows: Sequence[Sequence[int]], first: Sequence[int], count: int, device: torch.device) -> Places:
    """The places of `count` tokens of each row, from position `first[b]` of the sequence with pages `rows[b]`
    on."""
    seen = max(first)
    most = seen + count
    width = pages_of(most)
    run = _run(rows, width, most) if min(first) == seen else None
    if run is not None:
        write = Run(run.first + seen, run.rows, run.apart, count)
        return Places(write, run if seen else None, seen, most)
    table = torch.tensor([[*row[:width], *[NOTHING] * (width - len(row))] for row in rows])
    slots = (table.unsqueeze(2) * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten(1)[:, :most]
    begins = torch.tensor(first).unsqueeze(1)
    filled = slots.gather(1, begins + torch.arange(count)).flatten().to(device)
    if not seen:
        return Places(filled, None, 0, most)
    read = slots.masked_fill(torch.arange(most) >= begins + count, 0)
    return Places(filled, read.to(device), seen, most)


def _run(rows: Sequence[Sequence[int]], width: int, most: int) -> Run | None:
    """The first `most` slots of each row as a `Run`, or None if pages do not lie so."""
    begins = [row[0] for row in rows]
    apart = begins[1] - begins[0] if len(rows) > 1 else width
    even = apart > 0 and begins == list(range(begins[0], begins[0] + apart * len(rows), apart))
    if not even or any(list(row[:width]) != list(range(row[0], row[0] + width)) for row in rows):
        return None
    return Run(begins[0] * PAGE_TOKENS, len(rows), apart * PAGE_TOKENS, most)


class PagedCache:
    """Keys and values of one block, in pages.

    Holds keys and values of a token beside each other, (slots, 2 K, d), for the K heads that this rank
    computes. Multi-head latent attention instead holds (slots, c + r): the latent of c channels, then the
    rotary part of the keys, which all heads share. `places` are those of the forward under way.
    """

    places: Places

    def __init__(self, attention: nn.Module, pages: int, like: Tensor) -> None:
        """`attention` is that of the block, an `Attention` or a `LatentAttention`."""
        if isinstance(attention, LatentAttention):
            shape: tuple[int, ...] = (attention.mla.kv_rank + attention.mla.rope_dim,)
        else:
            assert isinstance(attention, Attention)
            shape = (2 * attention.k.weight.shape[0] // attention.head_dim, attention.head_dim)
        self._buffer = like.new_zeros(pages * PAGE_TOKENS, *shape)

    @property
    def filled(self) -> int:
        """The most tokens that a row had before this forward."""
        return self.places.seen

    def append(self, *new: Tensor) -> list[Tensor]:
        """Store T positions (B, T, ...) of each row, and return all that the rows attend to (B, S, ...)."""
        stored = self.store(torch.cat(new, 2) if len(new) > 1 else new[0])
        if self.places.read is None:
            return list(new)
        return list(stored.chunk(len(new), 2)) if len(new) > 1 else [stored]

    def store(self, x: Tensor) -> Tensor:
        """Store what a token has in one tensor (B, T, ...), and return that of all tokens that the rows
        attend to (B, S, ...)."""
        at, buffer = self.places, self._buffer
        if isinstance(at.write, Run):
            at.write.view(buffer).copy_(x)
        else:
            buffer.index_copy_(0, at.write, x.flatten(0, 1))
        if at.read is None:
            return x
        if isinstance(at.read, Run):
            return at.read.view(buffer)
        return buffer.index_select(0, at.read.flatten()).unflatten(0, at.read.shape)
