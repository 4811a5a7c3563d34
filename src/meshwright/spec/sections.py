"""The sections of a run file, and `Sections`, which holds one of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from meshwright.spec.base import MAX_BATCH, MAX_LENGTH, FrozenModel
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.precision import PrecisionSpec

Tracker = Literal["tensorboard", "wandb", "trackio"]


class DataSpec(FrozenModel):
    """Source of the tokens, and their division into samples of `seq_len` tokens."""

    corpus: str = Field(
        "stdlib",
        min_length=1,
        description="'stdlib' (the interpreter's own sources), 'synthetic', a file or folder of text, JSONL, "
        "parquet or sources, a folder made by `meshwright tokenize`, or 'hf:NAME[:CONFIG]' of the hub",
    )
    mixture: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="several corpora with their weights; replaces corpus"
    )
    tokenizer: str = Field(
        "bpe", description="'bpe' (trained to the model's vocabulary), 'bpe:N', 'byte', or a tokenizer.json"
    )
    text_key: str = Field("text", description="the key of the text in JSONL and parquet rows")
    seq_len: int = Field(512, ge=1, le=MAX_LENGTH, description="tokens in one sample")
    pack: bool = Field(True, description="join documents to fill samples; false gives each its own, padded")
    document_mask: bool = Field(True, description="no attention across documents, positions restart")
    val_fraction: float = Field(0.02, ge=0, lt=1, description="share of documents held out for validation")
    cache: str | None = Field(
        None, min_length=1, description="folder of tokenized corpora; default ~/.cache/meshwright"
    )


class TrainSpec(FrozenModel):
    """Length, learning rate and optimiser of the run."""

    steps: PositiveInt | None = Field(
        None, description="optimiser steps in all, also on resume (default 100)"
    )
    tokens: PositiveInt | None = Field(None, description="tokens in all, instead of steps")
    stop_at: PositiveInt | None = Field(None, description="stop after this step; the schedule is unchanged")
    batch_tokens: PositiveInt = Field(
        8192, le=MAX_BATCH, description="tokens of one optimiser step over all ranks"
    )
    seed: int = Field(0, ge=0, lt=2**63)
    lr: PositiveFloat = 3e-4
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine",
        description="after warm-up: cosine or linear to min_lr_ratio, stable then decay, or constant",
    )
    warmup_steps: int | None = Field(None, ge=0, description="default 2% of the steps")
    decay_fraction: float = Field(0.2, ge=0, le=1, description="share of the steps that wsd decays in")
    decay: Literal["linear", "1-sqrt", "cosine"] = Field(
        "linear", description="shape of wsd's decay: 1-sqrt falls fast and ends slowly (Haegele et al. 2024)"
    )
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="last learning rate / lr, but for constant")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="scale lr with batch_tokens / lr_base_batch_tokens (Goyal 2017; Malladi 2022)"
    )
    lr_base_batch_tokens: PositiveInt = 8192
    optimiser: Literal["adamw", "lion", "muon"] = Field(
        "adamw",
        description="AdamW (Loshchilov & Hutter 2019); Lion (Chen et al. 2023), which takes an lr 3 to 10 "
        "times smaller, a weight_decay as much larger, and beta2 = 0.99; or Muon (Jordan et al. 2024) for "
        "the matrices of blocks and AdamW for the rest, with AdamW's lr, and beta1 = 0.95",
    )
    weight_decay: float = Field(0.1, ge=0, description="decoupled; not on norms and biases")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: PositiveFloat = 1e-8
    clip: PositiveFloat | None = Field(
        1.0, description="largest global gradient norm; 'none' for no clipping"
    )
    eval_every: int = Field(0, ge=0, description="steps between validations; 0 validates at the end only")
    eval_tokens: PositiveInt | None = Field(
        10_000_000, description="held-out tokens of a validation at most; 'none' for all of them"
    )
    log_every: PositiveInt = 1
    compile: bool = Field(False, description="torch.compile each block")
    trackers: tuple[Tracker, ...] = ()

    @model_validator(mode="after")
    def _one_length(self) -> TrainSpec:
        if self.steps is not None and self.tokens is not None:
            raise UserError(
                f"train.tokens: {self.tokens} is given together with train.steps = {self.steps}; give one of "
                f"them, and 'none' for one that a run file or an earlier run has"
            )
        return self

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the optimiser's states of parameters."""
        return ("exp_avg",) if self.optimiser == "lion" else ("exp_avg", "exp_avg_sq")

    def moments_of(self, parameter: str, dims: int) -> tuple[str, ...]:
        """Names of the states of one parameter: those of matrices of blocks are fewer with Muon."""
        matrix = dims >= 2 and parameter.startswith("blocks.")
        return ("exp_avg",) if self.optimiser == "muon" and matrix else self.moments

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run; `tokens` are rounded up to whole steps."""
        if self.tokens is not None:
            return -(-self.tokens // self.batch_tokens)
        return self.steps if self.steps is not None else 100

    @property
    def last_step(self) -> int:
        """The step after which this start of the run stops."""
        return min(self.stop_at or self.total_steps, self.total_steps)


class NoRecompute(FrozenModel):
    """Keep every activation."""

    policy: Literal["none"] = "none"


class FullRecompute(FrozenModel):
    """Keep each block's input only (Chen et al. 2016)."""

    policy: Literal["full"] = "full"


SavedOp = Literal["attention", "matmul"]


class SelectiveRecompute(FrozenModel):
    """Keep the outputs of these operators, recompute the rest (Korthikanti et al. 2022)."""

    policy: Literal["selective"] = "selective"
    save: tuple[SavedOp, ...] = ("attention", "matmul")


RecomputeSpec = Annotated[NoRecompute | FullRecompute | SelectiveRecompute, Field(discriminator="policy")]


class CheckpointSpec(FrozenModel):
    """Frequency and folder of checkpoints."""

    dir: str | None = Field(None, min_length=1, description="default: checkpoints/ in the run's folder")
    every: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="steps between checkpoints; 0 saves at the end only, auto at the interval that wastes "
        "least time, from the measured cost of a save and recovery.mtbf_hours",
    )
    keep: PositiveInt = Field(3, description="newest checkpoints that are kept")
    keep_every: int = Field(
        0, ge=0, description="each n-th step is saved, too, and kept for ever; 0 keeps the newest only"
    )
    asynchronous: bool = Field(True, description="training waits for the copy only, not for the disk")

    def folder(self, out: Path) -> Path:
        """Return the folder of the checkpoints of the run in folder `out`."""
        return Path(self.dir) if self.dir else out / "checkpoints"


class RecoverySpec(FrozenModel):
    """Reaction of a run to bad steps and to failures, and its search for corrupted numbers."""

    max_skipped: int = Field(
        10, ge=0, description="steps in a row with a gradient that is not finite before the run stops"
    )
    snapshot_every: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="steps between snapshots in memory, from which ranks that failed go on; 'auto' finds an "
        "interval that costs 2% of the time, 0 keeps none",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="restarts of failed ranks in a row that get no further than the one before; 0 is none",
    )
    mtbf_hours: PositiveFloat | None = Field(
        None, description="mean hours between failures of the run, for checkpoint.every = 'auto'"
    )
    on_save_error: Literal["continue", "stop"] = Field(
        "continue", description="a disk that fails a save: go on and try again at the next, or stop at once"
    )
    vote_every: int = Field(
        100,
        ge=0,
        description="steps between comparisons of what several ranks hold alike, made before each save too; "
        "0 for none",
    )
    on_spike: Literal["ignore", "rollback", "stop"] = Field(
        "ignore",
        description="at a loss spike: nothing, go back to a checkpoint and leave out its batches, or stop",
    )
    spike_sigmas: PositiveFloat = Field(
        6.0, description="standard deviations of the loss above its mean that make a spike"
    )
    spike_norms: PositiveFloat = Field(
        10.0, description="gradient norm of a spike, as a multiple of the median"
    )
    spike_steps: PositiveInt = Field(3, description="steps in a row that make a spike")
    spike_window: PositiveInt = Field(200, description="good steps that the mean and the median are over")
    spike_skip: PositiveInt = Field(
        200, description="batches that a rollback leaves out at most, up to the last of the spike"
    )
    max_rollbacks: int = Field(10, ge=0, description="rollbacks of a run, before it stops at a spike")
    grace_seconds: PositiveFloat = Field(
        30.0, description="time that ranks have to save and end after a signal; then they are killed"
    )
    hang_seconds: float = Field(
        0.0,
        ge=0,
        description="time in one phase of a step, also of one that computes, from which ranks count as hung; "
        "0 learns it",
    )


class Sections(FrozenModel):
    """The sections of a run, each valid in itself; `RunSpec` adds the rules that hold between them."""

    model: ModelSpec = Field(default_factory=lambda: ModelSpec.model_validate({}))
    data: DataSpec = Field(default_factory=lambda: DataSpec())
    train: TrainSpec = Field(default_factory=lambda: TrainSpec())
    layout: Layout = Field(default_factory=lambda: Layout())
    precision: PrecisionSpec = Field(default_factory=lambda: PrecisionSpec())
    recompute: RecomputeSpec = Field(default_factory=NoRecompute)
    checkpoint: CheckpointSpec = Field(default_factory=lambda: CheckpointSpec())
    recovery: RecoverySpec = Field(default_factory=lambda: RecoverySpec())

    @property
    def batch_sequences(self) -> int:
        """Samples of one optimiser step, over all ranks."""
        return self.train.batch_tokens // self.data.seq_len

    @property
    def rank_sequences(self) -> int:
        """Samples of one optimiser step that one data rank reads."""
        return self.batch_sequences // self.layout.data_ranks

    @property
    def micro_batch(self) -> int:
        """Samples of one microbatch: `layout.micro_batch`, or as many as stay within 8,192 tokens.

        A pipeline that has enough samples gets at least 2 x pp microbatches.
        """
        if self.layout.micro_batch is not None:
            return self.layout.micro_batch
        most = max(1, 8192 // self.data.seq_len)
        if self.layout.pp > 1:
            most = min(most, max(1, self.rank_sequences // (2 * self.layout.pp)))
        sizes = range(1, min(most, self.rank_sequences) + 1)
        return max(size for size in sizes if not self.rank_sequences % size)

    @property
    def microbatches(self) -> int:
        """Gradient accumulation: microbatches of one rank in one optimiser step."""
        return self.rank_sequences // self.micro_batch
