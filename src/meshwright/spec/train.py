"""The section `[train]` of a run file: length, learning rate, optimiser and clipping."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from meshwright.spec.base import MAX_BATCH, FrozenModel
from meshwright.spec.batch_warmup import BatchStage, Warmup, batch_stages, check_warmup, read_warmup
from meshwright.spec.errors import UserError
from meshwright.spec.optimisers import OPTIMISERS, OptimiserKind, OptimiserName

Factor = Annotated[float, Field(strict=True, ge=0)]
"""A number of a table, which is neither a text nor a truth value."""
Tracker = Literal["tensorboard", "wandb", "trackio"]
AttentionChoice = Literal["auto", "cudnn", "FA2", "FA3", "FA4"]


LENGTHS = ("steps", "tokens", "epochs")
"""Keys that say how long a run is, one of them at most."""


class TrainSpec(FrozenModel):
    """Length, learning rate and optimiser of the run."""

    steps: PositiveInt | None = Field(
        None, description="optimiser steps in all, also on resume (default 100)"
    )
    tokens: PositiveInt | None = Field(None, description="tokens in all, instead of steps")
    epochs: PositiveFloat | None = Field(
        None, description="passes over the corpus, instead of steps; counted when the corpus is opened"
    )
    stop_at: PositiveInt | None = Field(None, description="stop after this step; the schedule is unchanged")
    batch_tokens: PositiveInt = Field(
        8192, le=MAX_BATCH, description="tokens of one optimiser step over all ranks"
    )
    batch_warmup: Warmup = Field(
        (),
        description="smaller batches at first: the tokens of a batch and the tokens seen at which its stage "
        "ends, for each stage before batch_tokens: 4096:100000,8192:300000",
    )
    seed: int = Field(0, ge=0, lt=2**63)
    lr: PositiveFloat = 3e-4
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine",
        description="after warm-up: cosine or linear to min_lr_ratio, stable then decay, or constant",
    )
    warmup_steps: int | None = Field(None, ge=0, description="default warmup_fraction of the steps")
    warmup_fraction: float = Field(
        0.02, ge=0, lt=1, description="share of the steps in which lr rises, where warmup_steps is none"
    )
    decay_fraction: float = Field(0.2, ge=0, le=1, description="share of the steps that wsd decays in")
    decay: Literal["linear", "1-sqrt", "cosine"] = Field(
        "linear", description="shape of wsd's decay: 1-sqrt falls fast and ends slowly (Haegele et al. 2024)"
    )
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="last learning rate / lr, but for constant")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="scale lr with the step's batch / lr_base_batch_tokens (Goyal 2017; Malladi 2022)"
    )
    lr_base_batch_tokens: PositiveInt = 8192
    optimiser: OptimiserName = Field(
        "adamw", description="; ".join(f"{name}: {kind.about}" for name, kind in OPTIMISERS.items())
    )
    weight_decay: float = Field(0.1, ge=0, description="decoupled; not on norms and biases")
    lr_factors: dict[str, Factor] = Field(
        default_factory=dict,
        description="factors on the learning rate, by patterns of parameters' names; 0 keeps their values",
    )
    weight_decays: dict[str, Factor] = Field(
        default_factory=dict, description="decay in place of the usual one, by patterns of parameters' names"
    )
    mtp_loss_scaling_factor: PositiveFloat = Field(
        0.1,
        description="factor on the mean loss of further tokens, which model.mtp_num_layers predicts (in "
        "DeepSeek-V3 0.3, then 0.1)",
    )
    frozen: tuple[str, ...] = Field(
        (),
        description="patterns of the names of parameters that are not trained, and keep their first values",
    )
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: PositiveFloat = 1e-8
    clip: PositiveFloat | None = Field(
        1.0, description="largest global gradient norm; 'none' for no clipping"
    )
    offload: Literal["none", "host", "disk"] = Field(
        "none",
        description="where the optimiser's moments are: on the device; in the host's memory, for GPUs; or in "
        "a mapped file",
    )
    offload_dir: str | None = Field(
        None, min_length=1, description="folder of that file; default the run's --out"
    )
    offload_activations: Literal["none", "host"] = Field(
        "none",
        description="where what a block saves for its backward is until then: on the device; or in the "
        "host's memory, for GPUs, but for the last block of each stage",
    )
    clip_parameter: PositiveFloat | None = Field(
        None,
        description="largest norm of each parameter's gradient, clipped before all together; 'none' for no "
        "such limit",
    )
    zclip: PositiveFloat | None = Field(
        None,
        description="clip gradient norms that are so many standard deviations above their moving average "
        "(ZClip, Kumar et al. 2025, who take 2.5); 'none' for no such limit",
    )
    zclip_alpha: float = Field(0.97, gt=0, lt=1, description="decay of ZClip's moving averages")
    zclip_warmup: int = Field(25, ge=2, description="steps whose norms begin ZClip's moving averages")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of a moving average of the weights, kept beside them; 'none' for no average",
    )
    eval_every: int = Field(0, ge=0, description="steps between validations; 0 validates at the end only")
    eval_tokens: PositiveInt | None = Field(
        10_000_000, description="held-out tokens of a validation at most; 'none' for all of them"
    )
    log_every: PositiveInt = 1
    compile: bool = Field(False, description="torch.compile each block")
    cuda_graphs: bool = Field(
        False,
        description="record the forward and backward of a microbatch as a CUDA graph, and replay it for all "
        "that follow; for GPUs",
    )
    attention_backend: AttentionChoice = Field(
        "auto",
        description="attention of bf16 and fp16 on NVIDIA GPUs: cuDNN's for whole sequences, or "
        "FlashAttention of torch (FA2) or of a package: FA3 on Hopper, FA4 on Hopper and Blackwell; auto "
        "takes the best that is there",
    )
    numa_binding: Literal["node", "none"] = Field(
        "node",
        description="processors of a rank on a GPU: those of the NUMA node that the GPU is at (node), or all "
        "(none); no effect on a CPU",
    )
    trackers: tuple[Tracker, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _earlier_key(cls, given: Any) -> Any:
        """Records of earlier versions have `flash_attention`, whose default was FA2."""
        if not isinstance(given, dict) or "flash_attention" not in given:
            return given
        release = given["flash_attention"]
        others = {key: value for key, value in given.items() if key != "flash_attention"}
        return {"attention_backend": "auto" if release == "FA2" else release} | others

    @field_validator("batch_warmup", mode="before")
    @classmethod
    def _stages(cls, given: Any) -> Warmup:
        return read_warmup(given)

    @model_validator(mode="after")
    def _batches_grow(self) -> TrainSpec:
        check_warmup(self.batch_warmup, self.batch_tokens)
        return self

    @model_validator(mode="after")
    def _one_length(self) -> TrainSpec:
        lengths = {key: getattr(self, key) for key in LENGTHS if getattr(self, key) is not None}
        if len(lengths) > 1:
            (one, first), (other, second) = list(lengths.items())[:2]
            raise UserError(
                f"train.{other}: {second} is given together with train.{one} = {first}; give one of them"
            )
        return self

    @property
    def optimiser_kind(self) -> OptimiserKind:
        """The row of the optimiser in the table of optimisers."""
        return OPTIMISERS[self.optimiser]

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the optimiser's states of parameters."""
        return self.optimiser_kind.moments

    def moments_of(self, parameter: str, dims: int) -> tuple[str, ...]:
        """Names of the states of one parameter: those of matrices of blocks may be fewer."""
        return self.optimiser_kind.moments_of(parameter, dims)

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run; `tokens` are rounded up to whole steps.

        `epochs` are 100 steps until the corpus is opened, and `RunSpec.counted` says how many they are.
        """
        if self.tokens is not None:
            return self.steps_for(self.tokens)
        return self.steps if self.steps is not None else 100

    @property
    def rising_steps(self) -> int:
        """Steps in which the learning rate rises; with a share of them at least one."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return max(1, round(self.warmup_fraction * self.total_steps)) if self.warmup_fraction else 0

    @property
    def batch_stages(self) -> tuple[BatchStage, ...]:
        """Stages of the batch's size, of which the last has no end."""
        return batch_stages(self.batch_warmup, self.batch_tokens)

    def batch_of_step(self, number: int) -> int:
        """Tokens of the batch of optimiser step `number`, from 1."""
        return next(
            stage.batch_tokens for stage in reversed(self.batch_stages) if stage.steps_before < max(1, number)
        )

    def tokens_after(self, steps: int) -> int:
        """Tokens of the first `steps` batches."""
        stage = next(stage for stage in reversed(self.batch_stages) if stage.steps_before <= steps)
        return stage.tokens_before + (steps - stage.steps_before) * stage.batch_tokens

    def steps_for(self, tokens: int) -> int:
        """The fewest steps whose batches have `tokens` tokens."""
        stage = next(stage for stage in reversed(self.batch_stages) if stage.tokens_before <= tokens)
        return stage.steps_before + -(-(tokens - stage.tokens_before) // stage.batch_tokens)

    @property
    def warmup_in_words(self) -> str:
        """A clause on the batch's warm-up, to stand behind `batch_tokens`; an empty text without one."""
        if not self.batch_warmup:
            return ""
        first = self.batch_stages[-1].steps_before + 1
        when = "" if first <= self.total_steps else ", which this run does not reach"
        return f" (from step {first:,}{when}; the batch's warm-up begins with {self.batch_warmup[0][0]:,})"

    @property
    def last_step(self) -> int:
        """The step after which this start of the run stops."""
        return min(self.stop_at or self.total_steps, self.total_steps)
