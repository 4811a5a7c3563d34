"""The engine for programs with a loop of their own: reinforcement learning, preference losses, research.

The caller has the loop and the data; the engine has the model, its layout, its optimiser and its checkpoints:

    with Engine.from_pretrained("Qwen/Qwen3-0.6B", layout__dp=2) as engine:
        for batch in batches:
            print(engine.forward_backward(batch)["loss"], engine.step()["grad_norm"])

Every method is collective: all ranks of the world call the same ones in the same order. Ranks with the same
`data_rank` (those of the tensor, context and pipeline axes) pass the same samples, others theirs.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.api import engine_arguments as arguments
from meshwright.api.engine_callbacks import EngineCallback, called
from meshwright.api.engine_checkpoints import load_checkpoint, save_checkpoint
from meshwright.api.engine_spec import check_runnable, pretrained_spec, spec_from
from meshwright.comm.collectives import gather_rows, start_all_reduce, start_broadcast
from meshwright.comm.mesh import Mesh
from meshwright.exchange.hf_stream import GatheredParameters, StreamedWeights, hf_state
from meshwright.model.decoder import Decoder
from meshwright.parallel.loss_function import LossFn, SampleLogProbs, SampleLoss
from meshwright.parallel.microbatches import microbatches, own_tokens
from meshwright.rank.world import mesh_of
from meshwright.spec import RunSpec, UserError
from meshwright.train.accumulation import Accumulation
from meshwright.train.given_batch import GivenBatch, read_batch
from meshwright.train.state_offload import StateOffload
from meshwright.train.step import Trainer
from meshwright.weights.initial_weights import open_weights

Row = dict[str, Any]


class Engine:
    """A model on this rank of a layout's world, with its optimiser.

    `spec` is a run, or the path of a run file or of a run's folder; of its data, batch and steps only the
    learning rates take any notice. The engine joins the default process group if there is one, as torchrun,
    Ray or another program has made it, and otherwise makes the world that torchrun's environment describes,
    which without any is this process alone. `mesh` is that of a caller who has built it.

    Raises `UserError`, also for a `group` that is a part of the world.
    """

    def __init__(
        self,
        spec: RunSpec | Path | str,
        group: dist.ProcessGroup | None = None,
        *,
        callbacks: Sequence[EngineCallback] = (),
        mesh: Mesh | None = None,
    ) -> None:
        self.spec = spec_from(spec)
        self.callbacks = arguments.checked_callbacks(callbacks)
        self.steps = 0
        """Optimiser steps taken."""
        check_runnable(self.spec)
        arguments.check_group(group)
        self._stack = ExitStack()
        try:
            self.mesh = mesh or self._stack.enter_context(_world(self.spec, group))
            self._trainer = Trainer(self.spec, self.mesh)
            weights = self.mesh.control.together(lambda: open_weights(self.spec))
            self.mesh.control.together(lambda: self._trainer.initialise(weights))
            self._trainer.compile_stages(evaluate=True)
        except BaseException:
            self._stack.close()
            raise
        self._gradients = Accumulation(self._trainer)
        self._states = StateOffload(self._trainer)
        atexit.register(self._leave)

    @classmethod
    def from_pretrained(
        cls,
        model: Path | str,
        group: dist.ProcessGroup | None = None,
        *,
        callbacks: Sequence[EngineCallback] = (),
        **keys: Any,
    ) -> Self:
        """Return an engine that starts from a model: an HF folder, a run's folder, or org/name of the hub.

        `keys` are those of a run file, with a dot or two underscores between table and name: `layout__tp=2`,
        or `**{"layout.tp": 2}`. Without an axis of the layout all ranks are data-parallel.
        """
        return cls(pretrained_spec(model, keys), group, callbacks=callbacks)

    # The world ----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.mesh.device

    @property
    def data_rank(self) -> int:
        """Which of `data_ranks` this rank's samples are those of."""
        return self.mesh.data_rank

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or groups of ranks, that have samples of their own."""
        return self.spec.layout.data_ranks

    def close(self) -> None:
        """Leave the world, which ends if the engine made it; every rank calls this."""
        atexit.unregister(self._leave)
        self._stack.close()

    def _leave(self) -> None:
        """Leave the world at the end of the process, without a wait for ranks that may have failed."""
        end = SystemExit()
        self._stack.__exit__(SystemExit, end, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        atexit.unregister(self._leave)
        self._stack.__exit__(kind, error, trace)

    # Steps --------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        batch: Mapping[str, Any],
        loss_fn: LossFn | None = None,
        count: float | None = None,
        *,
        entropy: bool = False,
        micro_batch: int | None = None,
    ) -> Row:
        """Add the gradient of a batch's loss to those since the last `step`; return its numbers.

        `batch` has the keys of `train/given_batch.py`, of this data rank's samples. The loss is the sum over
        the samples of all data ranks divided by the sum of their `count`s, which are by default the numbers
        of trained labels. Of several batches before a step the sums add up, and so do the counts: they are
        one batch. Without `loss_fn` the sum is that of -log p of each label: together, the mean
        cross-entropy.

        `loss_fn(log_probs, rows)` returns the SUM of the losses of some samples, a microbatch's:
        `log_probs` (B, T), in fp32 or fp64, has for each token that has a label its log-probability given
        those before it, at the token's own place, and 0 elsewhere; `rows` has the rows of the batch's
        tensors. With `entropy` the third argument has the entropies (B, T) of the predictions. It runs on
        ranks of the last stage alone, and gives those with the same samples the same number.

        `micro_batch` is the number of samples that are computed at a time, alike on all ranks, by default the
        run's. Returns `loss`, and `count`, the sum of all counts. Raises `UserError`.
        """
        self._check_onloaded("forward_backward")
        arguments.check_loss_fn(loss_fn)
        given, rows, total = self._agreed(batch, count, micro_batch)
        arguments.check_total(total, count is not None)
        if self._gradients.batches == 0:
            called(self.callbacks, "on_step_begin", self)
        padded = given.with_rows(rows)
        own = own_tokens(padded.batch, self.mesh)
        if loss_fn is None:
            for part in self._trainer.parts:
                own = part.with_answers(padded.batch, own)
        else:
            by_sample, others = self._split(given)
            axis, length = self.mesh.context, given.length
            own = replace(own, soft_targets=SampleLoss(axis, length, by_sample, entropy, loss_fn, others))
        share = self._gradients.add(own, rows * self.data_ranks, total, micro_batch)
        summed = share.clone()
        start_all_reduce(summed, self.mesh.world, "scalars").wait()
        return {"loss": float(summed), "count": total}

    def step(self, lr: float | None = None) -> Row:
        """Update the parameters by the gradients since the last step, and drop these; return its numbers.

        `lr` is the learning rate, by default that of the run's schedule. Returns `step`, `loss` (over all of
        the step's batches), `count`, `grad_norm` before clipping, `lr` and `skipped`, True where a gradient
        was not finite: then nothing was changed. Raises `UserError` without a `forward_backward` before.
        """
        if not self._gradients.batches:
            raise UserError("step: there is no gradient; call forward_backward first")
        arguments.check_rate(lr)
        count = self._gradients.count
        result = self._gradients.apply(self.steps + 1, lr)
        self.steps += 1
        row = {
            "step": self.steps,
            "loss": result.loss,
            "count": count,
            "grad_norm": result.grad_norm,
            "lr": result.rate,
            "skipped": not result.applied,
        }
        called(self.callbacks, "on_step_end", self, row)
        if self.steps % self.spec.train.log_every == 0:
            called(self.callbacks, "on_log", self, row)
        return row

    def zero_grad(self) -> None:
        """Drop the gradients since the last step, as a step does by itself."""
        self._gradients.drop()

    def log_probs(
        self, batch: Mapping[str, Any], *, entropy: bool = False, micro_batch: int | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probabilities (n, T) of this rank's labels, as `loss_fn` has them, without gradients.

        With `entropy` also the entropies (n, T) of their predictions. Every rank gets those of its samples.
        `micro_batch` is as in `forward_backward`.
        """
        self._check_onloaded("log_probs")
        given, rows, _ = self._agreed(batch, None, micro_batch)
        whole = given.with_rows(rows).batch
        what = SampleLogProbs(self.mesh.context, given.length, {"input_ids": given.batch.tokens}, entropy)
        own = replace(own_tokens(whole, self.mesh), soft_targets=what)
        micros = list(microbatches(own, micro_batch or self.spec.micro_batch, self.device))
        parts = self._trainer.pipeline.forward(micros)
        exact = torch.promote_types(self._trainer.states.formats.compute, torch.float32)
        shape = (2 if entropy else 1, given.samples, given.length)
        empty = torch.empty(shape, dtype=exact, device=self.device)
        found = torch.cat(parts, 1).contiguous() if parts else empty
        start_broadcast(found, self._trainer.pipeline.make(1).rank_of[-1], self.mesh.pipeline).wait()
        return (found[0], found[1]) if entropy else found[0]

    def _agreed(
        self, batch: Mapping[str, Any], count: float | None, micro_batch: int | None
    ) -> tuple[GivenBatch, int, float]:
        """The batch, the most samples of any data rank, and the counts of all of them, in one message.

        Raises `UserError` on all ranks where one cannot read what it was given, and where ranks that share
        samples were given others.
        """
        given: GivenBatch | None = None
        failure, further = None, self._trainer.further
        own = [1.0, self.data_rank, *[0.0] * 4, *[0.0] * bool(further.numbers)]
        try:
            arguments.check_micro_batch(micro_batch)
            given = read_batch(batch, self.spec.model, self.spec.layout)
            counted = arguments.checked_count(given.targets if count is None else count)
            numbers = [given.samples, given.batch.tokens.shape[1], counted, given.checksum]
            own = [0.0, self.data_rank, *numbers, *further.own_targets(given.batch)]
        except UserError as error:
            failure = error
        found = torch.tensor(own, dtype=torch.float64).to(self.device)
        rows = gather_rows(found, self.mesh.world).tolist()
        if failure is not None:
            raise failure
        assert given is not None
        arguments.check_alike(rows)
        arguments.check_padding(self.spec, rows, given)
        if further.numbers:
            further.expect_targets([sum(row[-1] for row in rows)])
        counts = {int(row[1]): row[4] for row in rows}
        return given, int(max(row[2] for row in rows)), sum(counts.values())

    def _split(self, given: GivenBatch) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of a batch by sample, and all else in it, on the device."""
        by_sample, others = {}, {}
        for name, value in given.given.items():
            if isinstance(value, Tensor) and value.ndim and len(value) == given.samples:
                by_sample[name] = value.to(self.device)
            else:
                others[name] = value.to(self.device) if isinstance(value, Tensor) else value
        return by_sample, others

    # Weights and states -------------------------------------------------------------------------------

    def hf_state(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor on the CPU) as the model's HF folder has them, on every rank.

        All ranks take the same ones; one parameter is in memory at a time. They are in `dtype`, by default as
        stored: then they are what `export` writes.
        """
        self._check_onloaded("hf_state")
        arguments.check_dtype("hf_state", dtype)
        master = self._trainer.states.formats.master
        return hf_state(self.spec.model, self._trainer.held, self.mesh, master, dtype)

    def load_hf_state(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take the weights of a model from (name, whole tensor) pairs as `hf_state` yields, in any order.

        Every rank passes all of them, and takes its part. The optimiser's moments stay as they are. Raises
        `UserError` on all ranks for a tensor that is unknown, misshapen or missing; the weights are then
        partly the old ones.
        """
        self._check_onloaded("load_hf_state")
        weights = StreamedWeights(self.spec.model, arguments.named_tensors(tensors))
        self.mesh.control.together(lambda: self._trainer.fill(weights))

    def decoder(self, dtype: torch.dtype | None = None) -> Decoder:
        """Return a copy of the whole model on this rank, for `meshwright.infer.generate`, in eval mode.

        Every rank gets one, in `dtype`, by default the format to compute in. It does not follow later steps.
        """
        self._check_onloaded("decoder")
        arguments.check_dtype("decoder", dtype)
        formats = self._trainer.states.formats
        held = self._trainer.held
        source = GatheredParameters(self.spec.model, held, self.mesh, formats.master)
        decoder = Decoder(self.spec.model).to(device=self.device, dtype=dtype or formats.compute).eval()
        with torch.no_grad():
            for name, tensor in decoder.tensors().items():
                tensor.copy_(source[name])
        return decoder

    def save(self, path: Path | str) -> Path:
        """Save a checkpoint, which any layout loads, into the run's folder `path`; return its own folder.

        `meshwright export`, `generate`, `evaluate` and `--from` take the folder. Raises `UserError`.
        """
        self._check_onloaded("save")
        folder = arguments.checked_path("save", path)
        saved = save_checkpoint(self._trainer, self.mesh, self.steps, folder)
        called(self.callbacks, "on_save", self, saved)
        return saved

    def load(self, path: Path | str, step: int | None = None) -> None:
        """Go on from a checkpoint in a run's folder, by default the newest, of an engine or of `train`.

        Its layout may be any, its model, optimiser and precision are this run's. Raises `UserError`.
        """
        self._check_onloaded("load")
        folder = arguments.checked_path("load", path)
        arguments.check_step(step)
        self.zero_grad()
        self.steps = load_checkpoint(self._trainer, self.mesh, folder, step)

    def offload(self) -> int:
        """Move weights, moments and averages to the host's memory; return the bytes freed on the device.

        Between two steps, for a sampler that needs the device. Raises `UserError` with gradients under way.
        """
        if self._gradients.batches:
            raise UserError("offload: gradients wait for a step; call step first")
        return self._states.offload()

    def onload(self) -> None:
        """Move what `offload` moved back, to the bit."""
        self._states.onload()

    def _check_onloaded(self, what: str) -> None:
        if self._states.is_out:
            raise UserError(f"{what}: the states are in the host's memory; call onload first")


def _world(spec: RunSpec, group: dist.ProcessGroup | None) -> Any:
    """A context in which this process has the mesh of its world, joined or made."""
    if group is not None and not dist.is_initialized():
        raise UserError("group: there is no default process group; leave it out, or make one first")
    if group is not None and group.size() != dist.get_world_size():
        raise UserError(
            f"group: has {group.size()} of the {dist.get_world_size()} ranks; an engine takes all ranks of "
            "the default process group, so start the others in a world of their own"
        )
    return mesh_of(spec)
