"""A frozen teacher on a mesh of its own over the run's ranks, which is asked about each step's tokens.

A step's samples go from the ranks that read them to those where the teacher takes them, and its answers to
the ranks of the student's last stage, each in one message (`distil/token_exchange.py`). Answers are
log-probabilities of the likeliest tokens, or of the whole vocabulary, and hidden states, if asked for.
`Distillation` is the part of a step that gives them to the loss.

Shapes: B samples of T tokens, V vocabulary, K of the likeliest tokens, D channels of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NotRequired

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import TypedDict

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.distil.stored_answers import TeacherState
from meshwright.distil.token_exchange import (
    TokenExchange,
    coordinates,
    tokens_at_the_end,
    whole_samples,
)
from meshwright.model.hooks import Predict
from meshwright.model.soft_targets import SoftTargets, SoftTargetSource
from meshwright.parallel.microbatches import microbatches, own_tokens
from meshwright.parallel.parallelize import initialise, parallelize
from meshwright.parallel.step_part import StepPart
from meshwright.parallel.tensor_parallel import parameter_pieces
from meshwright.spec import RunSpec, UserError
from meshwright.spec.differences import as_in_file
from meshwright.spec.distil import DistilSpec


class Teacher:
    """The teacher of a run on one rank; its weights are zeros until `draw` or a checkpoint fills them."""

    def __init__(self, student: RunSpec, spec: RunSpec, mesh: Mesh) -> None:
        assert student.distil is not None
        self.student, self.spec, self.how = student, spec, student.distil
        self._mesh, self._own = mesh, mesh.others["teacher"]
        self.identity: Mapping[str, Any] = {}
        built = parallelize(spec, self._own)
        self.states, self.balance, self._pipeline = built.states, built.balance, built.pipeline
        head = built.decoder.head
        head.hooks = replace(head.hooks, predict=partial(answers, self.how, head.hooks.predict))
        self._exchanges = lru_cache(self._exchanges_of)
        self._places = coordinates(student.layout)
        pieces = parameter_pieces(student, mesh)
        self._rows = pieces["embed.weight" if student.model.tied else "head.weight"].size
        exact = torch.promote_types(self.states.formats.compute, torch.float32)
        self._empty = torch.empty(0, self._columns, dtype=exact, device=mesh.device)

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of a forward on one token."""
        return self.spec.model.forward_flops(self.spec.data.seq_len)

    def draw(self) -> None:
        """Draw the weights from the teacher's seed."""
        initialise(self.states, self.spec.model, self.spec.train.seed)

    @property
    def _columns(self) -> int:
        """Numbers of an answer."""
        likeliest = self.spec.model.vocab_size if self.how.top_k is None else 2 * self.how.top_k + 1
        return likeliest + (self.spec.model.hidden if self.how.hidden else 0)

    def _exchanges_of(self, samples: int) -> tuple[TokenExchange, TokenExchange]:
        """The exchanges of a batch of so many samples: of questions, and of answers."""
        student, own = self.student.layout, self.spec.layout
        length, world = self.spec.data.seq_len, self._mesh.world
        asked = TokenExchange(whole_samples(student, samples), whole_samples(own, samples), length, world)
        ends = tokens_at_the_end(own, samples), tokens_at_the_end(student, samples)
        return asked, TokenExchange(*ends, length, world)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> SoftTargets | None:
        samples = len(batch.tokens) * self.student.layout.data_ranks
        questions, replies = self._exchanges(samples)
        device, length = self._mesh.device, self.spec.data.seq_len
        fields = torch.stack([batch.tokens, batch.positions, batch.documents], -1).to(
            device, non_blocking=True
        )
        asked = questions(fields.flatten(0, 1)).unflatten(0, (-1, length)).unbind(-1)
        tokens, positions, documents = asked
        numbers = torch.arange(len(tokens))
        whole = Batch(tokens, tokens, positions, documents.cpu(), numbers, numbers)
        micros = list(microbatches(own_tokens(whole, self._own), self.spec.micro_batch, device))
        found = self._pipeline.forward(micros)
        rows = torch.cat(found).flatten(0, 1) if found else self._empty
        rows = replies(rows, self._for_rank if self.how.top_k is None else None)
        if not len(rows):
            return None
        return unpacked(self.how, rows.unflatten(0, (len(batch.tokens), -1)), self._rows)

    def _for_rank(self, rank: int, rows_NC: Tensor) -> Tensor:
        """Whole answers with the part of the vocabulary only that a rank of the student has, and padding."""
        vocabulary, first = self.spec.model.vocab_size, self._places[rank].tensor * self._rows
        part = rows_NC[:, :vocabulary][:, first : first + self._rows]
        return torch.cat([F.pad(part, (0, self._rows - part.shape[1])), rows_NC[:, vocabulary:]], 1)


def answers(
    how: DistilSpec,
    logits_of: Predict,
    x_BTD: Tensor,
    weight: Tensor,
    _targets: Tensor | None,
    _scale: float,
    _soft: SoftTargets | None,
    softcap: float | None,
) -> Tensor:
    """The teacher's answers (B, T, C): log-probabilities, then tokens' indices, then hidden states.

    The logits of one sample are there at a time.
    """
    return torch.cat(
        [_packed(how, logits_of(x, weight, None, 1.0, None, softcap), x) for x in x_BTD.split(1)]
    )


def _packed(how: DistilSpec, logits: Tensor, x: Tensor) -> Tensor:
    exact = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.log_softmax(logits.to(exact) / how.temperature, -1)
    found = [log_p]
    if how.top_k is not None:
        values, indices = log_p.topk(how.top_k)
        rest = log_p.scatter_(-1, indices, float("-inf")).logsumexp(-1, keepdim=True)
        found = [values, rest, indices.to(exact)]  # whole numbers, exact up to 2^24
    if how.hidden:
        found.append(x.to(exact))
    return torch.cat(found, -1)


def unpacked(how: DistilSpec, rows_BTC: Tensor, vocabulary: int) -> SoftTargets:
    """Answers (B, T, C) unpacked, with so many rows of the vocabulary where there is no `top_k`."""
    indices, end = None, vocabulary
    if how.top_k is not None:
        end = how.top_k + 1
        indices = rows_BTC[..., end : end + how.top_k].long()
    hidden = rows_BTC[..., end + (how.top_k or 0) :] if how.hidden else None
    return SoftTargets(how, rows_BTC[..., :end], indices, hidden)


# The part of a step -----------------------------------------------------------------------------------


class _Fields(TypedDict):
    """Fields of a checkpoint's state."""

    teacher: NotRequired[TeacherState]


class Distillation(StepPart):
    """A step's lessons from `teaching`, by the keys of `[distil]`."""

    Fields = _Fields

    def __init__(self, how: DistilSpec, teaching: SoftTargetSource) -> None:
        self.how, self.teaching = how, teaching

    def with_answers(self, batch: Batch, own: Batch) -> Batch:
        """`own`, this rank's tokens of a batch, with the teacher's answers about them."""
        return replace(own, soft_targets=self.teaching(batch))

    def state(self) -> dict[str, Any]:
        """Says which teacher it is."""
        return {"teacher": dict(self.teaching.identity)}

    def check(self, state: Mapping[str, Any], where: str) -> None:
        """Refuse a checkpoint that learned from another teacher, or by another loss from this one.

        Distillation may begin and end at any checkpoint. A teacher may be asked or have answered before, on
        any layout.
        """
        before, how = state["spec"].get("distil"), self.how
        if before is None:
            return
        was, now = state["teacher"], self.teaching.identity
        if was["sha256"] != now["sha256"]:
            raise UserError(
                f"{where} learned from a teacher's checkpoint of step {was['step']} (SHA-256 "
                f"{was['sha256'][:12]}), and distil.{'teacher' if how.teacher else 'logits'} is now of step "
                f"{now['step']} ({now['sha256'][:12]}); give that teacher, of which meshwright average "
                f"TEACHER --steps {was['step']} makes a run of its own, or another --out"
            )
        after = how.model_dump(mode="json")
        for key in ("loss", "weight", "temperature", "top_k", "hidden"):
            if before[key] != after[key]:
                raise UserError(
                    f"{where} is of another run: distil.{key} was {as_in_file(before[key])} and is "
                    f"{as_in_file(after[key])}; give the same value, or another --out"
                )

    def flops_per_token(self) -> float:
        """Model FLOPs of an answer about one token; 0 for one that is read."""
        return self.teaching.flops_per_token


def distillation_of(spec: RunSpec, teaching: SoftTargetSource | None) -> list[Distillation]:
    """The part that learns from a teacher, in a list; none in a run without distillation."""
    assert (teaching is None) == (spec.distil is None)
    return [Distillation(spec.distil, teaching)] if spec.distil is not None and teaching is not None else []
