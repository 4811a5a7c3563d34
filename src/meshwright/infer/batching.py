"""Continuous batching: requests join and leave the batch between tokens (Yu et al. 2022, Orca).

A turn is one forward: prompts of equal lengths, or a part of one, or the next token of all that have begun.
With lookup, it also reads tokens that may follow (`lookup.py`), and those that do follow save turns.
Where pages run out, the request that began last gives its own back, and reads its prompt and its tokens again
later (Kwon et al. 2023, recomputation).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from meshwright.infer.lookup import Lookup
from meshwright.infer.paged_cache import SCRATCH, PageTable
from meshwright.spec.serving import MOST_PROMPT_TOKENS


@dataclass
class Request:
    """A prompt and its continuation: at most `most` tokens, up to the first of `stop_ids`, included."""

    number: int
    prompt: list[int]
    most: int
    stop_ids: Collection[int] = ()
    new: list[int] = field(default_factory=list)
    lookup: Lookup = field(default_factory=Lookup)
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens whose keys and values are in the pages."""

    def __len__(self) -> int:
        """Number of tokens of the prompt and the continuation so far."""
        return len(self.prompt) + len(self.new)

    def unread(self, most: int) -> list[int]:
        """The next tokens, at most so many, whose keys and values are not in the pages."""
        last = self.cached == len(self) - 1  # the usual case; a long text is not copied for it
        return (self.new or self.prompt)[-1:] if last else (self.prompt + self.new)[self.cached :][:most]

    @property
    def text(self) -> list[int]:
        """The continuation without the token that ended it."""
        return self.new[:-1] if self.stopped else list(self.new)

    @property
    def stopped(self) -> bool:
        """True if the last token is one of `stop_ids`."""
        return bool(self.new) and self.new[-1] in self.stop_ids

    @property
    def ended(self) -> bool:
        """True if no token is to follow."""
        return len(self.new) >= self.most or self.stopped


@dataclass(frozen=True)
class ForwardBatch:
    """One forward of the decoder over B rows of T tokens each.

    `pages` and `first` are the pages of each row's sequence, and the position of its first token.
    `requests` number those whose next tokens are to be chosen, one for each row, or none: those that follow
    each of a row's last `chosen` tokens.
    """

    tokens: list[list[int]]
    pages: list[list[int]]
    first: list[int]
    requests: list[int]
    chosen: int = 1

    @property
    def positions(self) -> list[int]:
        """Where the tokens that are chosen will stand, row by row."""
        ends = [first + len(row) for first, row in zip(self.first, self.tokens, strict=True)]
        return [end - before for end in ends for before in reversed(range(self.chosen))]


IDLE = ForwardBatch([[0]], [[SCRATCH]], [0], [])
"""The turn of a rank without requests, while others of its experts have some."""

Forward = Callable[[ForwardBatch], list[list[int]]]
"""Runs a turn, and returns the tokens that are chosen for each row, if any are to be."""


class Batching:
    """Requests under way, and those that wait."""

    def __init__(
        self, forward: Forward, table: PageTable, most_rows: int, reserve: bool = False, lookup: int = 0
    ) -> None:
        """`reserve` takes the pages of all tokens that a request may have when it joins, so that they follow
        each other; `table` must hold them. `lookup` is the most tokens that a turn reads ahead."""
        self.forward, self.table, self.most_rows, self.reserve = forward, table, most_rows, reserve
        self.lookup = lookup
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self._pressed = False
        """True since a request gave its pages back, until one ends: who joined now would soon do so, too."""

    def run(self, requests: Sequence[Request], together: Callable[[bool], bool] = bool) -> Iterator[Request]:
        """Yield a request after each new token of it, until all have ended.

        The pages must hold the longest of them. `together` gets whether this rank has work left, and says
        whether any rank has whose turns must come with this one's.
        """
        self.waiting += (request for request in requests if not request.ended)
        while together(bool(self.waiting or self.active)):
            turn, rows = self._next()
            for request, read, chosen in zip(rows, turn.tokens, self.forward(turn), strict=False):
                ahead = read[len(read) - turn.chosen + 1 :]
                request.cached -= len(ahead)
                for token, guessed in zip(chosen, [*ahead, None], strict=True):
                    request.new.append(token)
                    yield request
                    if request.ended or token != guessed:
                        break
                    request.cached += 1
            for request in [request for request in self.active if request.ended]:
                self.active.remove(request)
                self.table.release(request.pages)
                self._pressed = False

    def _next(self) -> tuple[ForwardBatch, list[Request]]:
        """The next turn, and the requests that it gives a token.

        All that have begun lack the keys and values of one token, the last, once their prompts are read.
        """
        if not self.active and not self.waiting:
            return IDLE, []
        if reading := self._reading():
            turn = self._turn(reading)
            whole = reading[0].cached == len(reading[0])
            return (turn, reading) if whole else (replace(turn, requests=[]), [])
        began, ahead = list(self.active), self._ahead()
        count = len(ahead[0])
        for request in list(self.active):
            while request in self.active and not self.table.grow(request.pages, request.cached + 1 + count):
                self._put_back(self.active[-1])
        guesses = {request.number: tokens for request, tokens in zip(began, ahead, strict=True)}
        rows = sorted(self.active, key=lambda request: request.pages[0])  # evenly spaced if possible
        return self._turn(rows, [guesses[request.number] for request in rows]), rows

    def _ahead(self) -> list[list[int]]:
        """Tokens that may follow those of each active request, as many for each. Wrong ones cost time."""
        room = min(request.most - len(request.new) - 1 for request in self.active)
        most = min(self.lookup, room)
        if most < 1:
            return [[] for _ in self.active]
        found = [request.lookup.following(request.prompt, request.new, most) for request in self.active]
        count = max(map(len, found))
        return [tokens + [0] * (count - len(tokens)) for tokens in found]

    def _reading(self) -> list[Request]:
        """Requests of equal lengths whose prompts are to be read now: one under way, or some that join."""
        if self.active and len(self.active[-1]) - self.active[-1].cached > 1:
            return [self.active[-1]]
        joined: list[Request] = []
        while not self._pressed and self.waiting and len(self.active) < self.most_rows:
            length = len(self.waiting[0])
            if joined and (length != len(joined[0]) or length * (len(joined) + 1) > MOST_PROMPT_TOKENS):
                break
            most = len(self.waiting[0].prompt) + self.waiting[0].most if self.reserve else length
            if not self.table.grow(self.waiting[0].pages, most):
                break
            joined.append(self.waiting.popleft())
            self.active.append(joined[-1])
        return joined

    def _put_back(self, request: Request) -> None:
        self.active.remove(request)
        self.table.release(request.pages)
        request.cached, self._pressed = 0, True
        self.waiting.appendleft(request)

    def _turn(self, rows: Sequence[Request], ahead: Sequence[list[int]] = ()) -> ForwardBatch:
        """The forward of each row's tokens that are not read yet and of those `ahead`: all count as read from
        here on."""
        tokens = [request.unread(MOST_PROMPT_TOKENS) for request in rows]
        if ahead:
            tokens = [[*own, *guessed] for own, guessed in zip(tokens, ahead, strict=True)]
        turn = ForwardBatch(
            tokens,
            [list(request.pages) for request in rows],
            [request.cached for request in rows],
            [request.number for request in rows],
            1 + len(ahead[0]) if ahead else 1,
        )
        for request, read in zip(rows, tokens, strict=True):
            request.cached += len(read)
        return turn
