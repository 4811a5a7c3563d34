"""An engine of verl's (`BaseEngine`, verl 0.9): Meshwright in the place of FSDP or Megatron.

    VERL_USE_EXTERNAL_MODULES=meshwright.api.verl_engine   registers the backend "meshwright"
    engine: {_target_: meshwright.api.verl_engine.MeshwrightEngineConfig, keys: {layout.tp: 2}}

verl's loss functions return, for some samples of a data rank, a loss that is summed over microbatches and
then averaged over data ranks: so each data rank counts 1 (`Engine.forward_backward`). They read
log-probabilities one place before the token's own, as jagged tensors (n, j) of samples of j tokens.

Not supported: value models, images, adapters, router replay, and temperatures other than 1 in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.py_functional import append_to_dict
from verl.workers.config.engine import EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import detach_tree

from meshwright.api.engine import Engine
from meshwright.api.engine_spec import pretrained_spec
from meshwright.comm.mesh import rank_grid
from meshwright.optim.lr_schedule import learning_rate
from meshwright.schedule import schedule_of
from meshwright.spec import UserError

LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]
"""(model_output=, data=, dp_group=) -> loss, metrics; as in verl.workers.utils.losses."""


@dataclass
class MeshwrightEngineConfig(EngineConfig):
    """verl's configuration of an engine, with `keys` of a run file, such as {"layout.tp": 2}."""

    strategy: str = "meshwright"
    keys: dict[str, Any] = field(default_factory=dict)


@EngineRegistry.register(model_type="language_model", backend="meshwright", device=["cuda", "cpu"])
class MeshwrightEngine(BaseEngine):
    """A `meshwright.Engine` with the methods that verl's workers call; it joins their process group."""

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        self.engine_config, self.mode = engine_config, None
        if engine_config.param_offload != engine_config.optimizer_offload:
            raise UserError(
                "engine.param_offload: weights and moments are moved together here; give "
                "optimizer_offload the same value"
            )
        keys = {**keys_of(engine_config, optimizer_config), **engine_config.keys}
        self.spec = pretrained_spec(model_config.local_path, keys)
        self.engine: Engine | None = None
        self._rate_steps = 0
        self._place = _Place.of(self.spec.layout, dist.get_rank())
        self._data_group, _ = dist.new_subgroups_by_enumeration(self._place.data_groups)

    def initialize(self) -> None:
        """Load the model, or load it again."""
        if self.engine is not None:
            self.engine.close()
        self.engine = Engine(self.spec)
        self._rate_steps = 0

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None, "initialize comes first"
        return self.engine

    # Steps --------------------------------------------------------------------------------------------

    def train_mode(self, **how: Any) -> BaseEngineCtx:
        """A context in which the engine trains."""
        return BaseEngineCtx(self, "train", **how)

    def eval_mode(self, **how: Any) -> BaseEngineCtx:
        """A context in which the engine computes log-probabilities."""
        return BaseEngineCtx(self, "eval", **how)

    def optimizer_zero_grad(self) -> None:
        """Drop gradients."""
        self._engine.zero_grad()

    def optimizer_step(self) -> float:
        """Update at the rate of the schedule; returns the gradient's norm before clipping."""
        norm: float = self._engine.step(self._rate)["grad_norm"]
        return norm

    def lr_scheduler_step(self) -> float:
        """Go on to the next learning rate, and return it."""
        self._rate_steps += 1
        return self._rate

    @property
    def _rate(self) -> float:
        return learning_rate(self.spec.train, self._rate_steps + 1)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Forward of this data rank's samples, and the backward of their loss unless `forward_only`.

        Returns `model_output` (forward only: log-probabilities, and entropies if asked for), `loss` and
        `metrics` by microbatch, on the ranks with outputs.
        """
        batch, lengths = _dense(data)
        entropy = bool(tensordict_utils.get_non_tensor_data(data, "calculate_entropy", False))
        self._add_counts(data)
        micro_batch = self._micro_batch(data, batch["input_ids"].shape[1])
        if forward_only:
            found = self._engine.log_probs(batch, entropy=entropy, micro_batch=micro_batch)
            both = found if isinstance(found, tuple) else (found,)
            output = _model_output(both, lengths)
            if loss_function is None:
                return {"model_output": output, "loss": [1.0], "metrics": {}}
            with torch.no_grad():
                loss, metrics = loss_function(model_output=output, data=data, dp_group=self._data_group)
            return {"model_output": output, "loss": [float(loss)], "metrics": append_to({}, metrics)}
        assert loss_function is not None
        losses: list[float] = []
        collected: dict[str, Any] = {}

        def loss_of(log_probs: Tensor, rows: Mapping[str, Tensor], *entropies: Tensor) -> Tensor:
            samples = tensordict_utils.index_select_tensor_dict(data, rows["sample"].cpu()).to(
                log_probs.device
            )
            output = _model_output((log_probs, *entropies), lengths[rows["sample"].cpu()])
            loss, metrics = loss_function(model_output=output, data=samples, dp_group=self._data_group)
            losses.append(float(loss.detach()))
            append_to(collected, detach_tree(metrics))
            return loss

        self._engine.forward_backward(batch, loss_of, 1, entropy=entropy, micro_batch=micro_batch)
        return {"model_output": {}, "loss": losses, "metrics": collected}

    def _add_counts(self, data: TensorDict) -> None:
        """Add to a batch what verl's losses divide by."""
        tokens = data["loss_mask"].sum().to(self._engine.device)
        dist.all_reduce(tokens, group=self._data_group)
        tensordict_utils.assign_non_tensor(
            data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size()
        )

    def _micro_batch(self, data: TensorDict, length: int) -> int:
        """Samples of a microbatch of rows of `length` tokens, alike on all ranks."""
        group = int(tensordict_utils.get_non_tensor_data(data, "force_group_size", 1))
        if tensordict_utils.get_non_tensor_data(data, "use_dynamic_bsz", True):
            most = int(tensordict_utils.get_non_tensor_data(data, "max_token_len_per_gpu", length))
            rows = max(1, most // (length * group)) * group
        else:
            rows = int(tensordict_utils.get_non_tensor_data(data, "micro_batch_size_per_gpu", 1)) * group
        least = torch.tensor(rows, device=self._engine.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    # The world ----------------------------------------------------------------------------------------

    def get_data_parallel_size(self) -> int:
        """Number of ranks, or groups of ranks, with samples of their own."""
        return self.spec.layout.data_ranks

    def get_data_parallel_rank(self) -> int:
        """Which of them this rank's samples are those of."""
        return self._place.data_rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks at this rank's place in the model, one of each data rank."""
        return self._data_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """True on the one rank of each data rank whose outputs are taken."""
        return self._place.has_outputs

    # States -------------------------------------------------------------------------------------------

    @property
    def is_param_offload_enabled(self) -> bool:
        """True if weights leave the device between uses."""
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """True if moments leave the device between uses."""
        return bool(self.engine_config.optimizer_offload)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move weights and moments to the host's memory, or back, whichever of them is asked for."""
        if not (model or optimizer):
            return
        if device == "cpu":
            self._engine.offload()
        else:
            self._engine.onload()

    def get_per_tensor_param(self, **_how: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """(name, whole tensor) in the format to compute in, on the device, for a sampler; and no adapter."""
        engine = self._engine
        engine.onload()
        compute = engine._trainer.states.formats.compute
        return ((name, each.to(engine.device)) for name, each in engine.hf_state(compute)), None

    def save_checkpoint(self, local_path: str, *_: Any, **_how: Any) -> None:
        """Save a checkpoint into the run's folder `local_path`."""
        self._engine.save(local_path)

    def load_checkpoint(self, local_path: str, *_: Any, **_how: Any) -> None:
        """Go on from the newest checkpoint in the run's folder `local_path`, of any layout."""
        self._engine.load(Path(local_path))


@dataclass(frozen=True)
class _Place:
    """A rank's place in a layout, before its mesh is there."""

    data_rank: int
    has_outputs: bool
    data_groups: list[list[int]]
    """The ranks of each place in the model, by data rank."""

    @classmethod
    def of(cls, layout: Any, rank: int) -> _Place:
        grid = rank_grid(layout).unflatten(2, (layout.dp, layout.cp))  # (pp, replicate, dp, cp, tp)
        (stage, replica, shard, context, tensor) = (grid == rank).nonzero()[0].tolist()
        last = schedule_of(layout, 1).rank_of[-1]
        groups = grid.permute(0, 3, 4, 1, 2).reshape(-1, layout.data_ranks).tolist()
        first = stage == last and context == 0 and tensor == 0
        return cls(replica * layout.dp + shard, first, groups)


def keys_of(engine_config: Any, optimizer_config: Any) -> dict[str, Any]:
    """The keys of a run file that verl's configurations of an engine and an optimiser say."""
    keys: dict[str, Any] = {"precision.compute": {"bfloat16": "bf16", "float16": "fp16"}.get(
        engine_config.dtype, "fp32"), "train.seed": engine_config.seed}  # fmt: skip
    if optimizer_config is None:
        return keys
    total = max(1, optimizer_config.total_training_steps)
    warmup = optimizer_config.lr_warmup_steps
    if warmup is None or warmup < 0:
        warmup = int(optimizer_config.lr_warmup_steps_ratio * total)
    beta1, beta2 = optimizer_config.betas
    keys |= {
        "train.lr": optimizer_config.lr, "train.weight_decay": optimizer_config.weight_decay,
        "train.beta1": beta1, "train.beta2": beta2, "train.clip": optimizer_config.clip_grad,
        "train.steps": total, "train.warmup_steps": min(warmup, total),
    }  # fmt: skip
    if getattr(optimizer_config, "lr_scheduler_type", "constant") != "cosine":
        return keys | {"train.schedule": "constant"}
    return keys | {"train.min_lr_ratio": optimizer_config.min_lr_ratio or 0.0}


def append_to(collected: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """Add a microbatch's metrics to those of the microbatches before it."""
    append_to_dict(collected, metrics)
    return collected


def _dense(data: TensorDict) -> tuple[dict[str, Tensor], Tensor]:
    """Samples as an engine takes them, padded on the right, and their lengths (n,).

    Raises `UserError` for what an engine does not compute.
    """
    temperature = data.get("temperature", 1.0)
    temperature = tensordict_utils.unwrap_non_tensor_data(temperature)
    if not bool((torch.as_tensor(temperature) == 1).all()):
        raise UserError(
            f"rollout.temperature: {temperature} divides the logits of the loss, which this engine does not; "
            "give 1"
        )
    tokens = data["input_ids"]
    if not tokens.is_nested:
        raise UserError("input_ids: is not jagged; give verl's data with pad_mode NO_PADDING")
    if data.get("multi_modal_inputs", None) is not None:
        raise UserError("multi_modal_inputs: this engine has models of text alone; remove them")
    lengths = tokens.offsets().diff().cpu()
    padded = torch.nested.to_padded_tensor(tokens, 0)
    present = torch.arange(padded.shape[1]) < lengths.unsqueeze(1)
    batch = {
        "input_ids": padded, "attention_mask": present.long(), "sample": torch.arange(len(padded)),
    }  # fmt: skip
    return batch, lengths


def _model_output(found: tuple[Tensor, ...], lengths: Tensor) -> dict[str, Tensor]:
    """Log-probabilities, and entropies behind them, as jagged tensors one place before the tokens' own."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(found[0].device)
    names = ("log_probs", "entropy")

    def jagged(rows: Tensor) -> Tensor:
        before = torch.nn.functional.pad(rows[:, 1:], (0, 1))
        parts = [row[:length] for row, length in zip(before, lengths.tolist(), strict=True)]
        return torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)

    return {name: jagged(rows) for name, rows in zip(names, found, strict=False)}
