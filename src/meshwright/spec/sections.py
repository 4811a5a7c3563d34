"""The sections of a run file, and `Sections`, which holds one of each."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from meshwright.spec.base import MAX_LENGTH, FrozenModel
from meshwright.spec.distil import DistilSpec
from meshwright.spec.layout import Layout
from meshwright.spec.lora import LoraSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.outer import OuterSpec
from meshwright.spec.pipeline_schedules import WHOLE_SCHEDULE
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.preference import ForwardAhead, PreferenceSpec
from meshwright.spec.train import TrainSpec

DataFormat = Literal["auto", "text", "chat", "prompt", "alpaca", "sharegpt", "preference", "judged"]
"""Kinds of rows of a corpus (`data.format`)."""
ROW_KEYS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system",
    "history", "chosen", "rejected", "label", "tools", "chat_template_kwargs",
)  # fmt: skip
"""Keys of rows that are chats, whatever their format."""


class DataSpec(FrozenModel):
    """Source of the tokens, and their division into samples of `seq_len` tokens."""

    corpus: str = Field(
        "stdlib",
        min_length=1,
        description="'stdlib' (the interpreter's own sources), 'synthetic', a file or folder of text, JSON, "
        "JSONL, CSV, parquet or sources, a folder made by `meshwright tokenize`, 'hf:NAME[:CONFIG]' of "
        "the hub, the prefix of a data set of Megatron, or a URL such as s3://bucket/folder",
    )
    mixture: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="several corpora with their weights; replaces corpus"
    )
    tokenizer: str = Field(
        "bpe",
        description="'bpe' (trained to the model's vocabulary), 'bpe:N', 'byte', or a tokenizer.json or the "
        "folder that has it; default that of model.weights, if it names any",
    )
    special_tokens: Literal["text", "read"] = Field(
        "text",
        description="special tokens that a text spells, as a rendered chat does: 'text' takes their "
        "characters, 'read' the tokens",
    )
    text_key: str = Field("text", description="the key of the text in rows of JSON, CSV and parquet")
    format: DataFormat = Field(
        "auto",
        description="what a row is: 'chat' (messages), 'sharegpt' (conversations), 'alpaca' (instruction, "
        "input, output), 'prompt' (prompt, completion), 'preference' (chosen, rejected), 'judged' (prompt, "
        "completion, label) or 'text'; 'auto' "
        "tells it from the keys of the first row. Of chats the assistant's turns are trained on, and each "
        "stays whole in one sample",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="what the rows of chats call the keys of their format, as instruction = 'question'; they "
        "are " + ", ".join(ROW_KEYS),
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="file of the template (Jinja) that renders chats, or a folder that has one; default that "
        "beside data.tokenizer",
    )
    seq_len: int = Field(512, ge=1, le=MAX_LENGTH, description="tokens in one sample")
    pack: bool = Field(True, description="join documents to fill samples; false gives each its own, padded")
    document_mask: bool = Field(True, description="no attention across documents, positions restart")
    val_fraction: float = Field(0.02, ge=0, lt=1, description="share of documents held out for validation")
    cache: str | None = Field(
        None, min_length=1, description="folder of tokenized corpora; default ~/.cache/meshwright"
    )

    @property
    def has_chats(self) -> bool:
        """True if the rows are said to be chats, whose assistant's turns alone are trained on."""
        return self.format not in ("auto", "text")


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

    @property
    def saved_words(self) -> str:
        """The operators that it saves, as a flag takes them; an empty text where they are the usual ones."""
        return "" if self == SelectiveRecompute() else ",".join(self.save) or "nothing"


RecomputeSpec = Annotated[NoRecompute | FullRecompute | SelectiveRecompute, Field(discriminator="policy")]


class CheckpointSpec(FrozenModel):
    """Frequency and folder of checkpoints."""

    dir: str | None = Field(None, min_length=1, description="default: checkpoints/ in the run's folder")
    every: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="steps between checkpoints; auto saves at the interval that wastes least time, from the "
        "measured cost of a save and recovery.mtbf_hours, 0 at the end only",
    )
    keep: PositiveInt = Field(3, description="newest checkpoints that are kept")
    keep_every: int = Field(
        0, ge=0, description="each n-th step is saved, too, and kept for ever; 0 keeps the newest only"
    )
    asynchronous: bool = Field(True, description="training waits for the copy only, not for the disk")
    remote: str | None = Field(
        None,
        min_length=1,
        description="URL of a second tier, such as s3://bucket/run: checkpoints are copied there behind "
        "training, and fetched where dir has none, or older ones",
    )
    remote_every: PositiveInt = Field(
        1,
        description="each n-th checkpoint of a start is copied to remote, and the last one; those of "
        "keep_every always",
    )

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
        description="steps between snapshots, from which ranks that failed go on; 'auto' finds an "
        "interval that costs 2% of the time at most, 0 keeps none",
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
    job_end_margin: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="seconds before the end of the scheduler's job at which the run saves and ends, to be "
        "started again; 'auto' is 60 and twice the longest step, 0 takes no notice of it",
    )
    health_probe: bool = Field(
        True, description="check memory, folder, arithmetic and a collective of a host before a restart"
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
    outer: OuterSpec = Field(default_factory=lambda: OuterSpec())
    precision: PrecisionSpec = Field(default_factory=lambda: PrecisionSpec())
    recompute: RecomputeSpec = Field(default_factory=NoRecompute)
    checkpoint: CheckpointSpec = Field(default_factory=lambda: CheckpointSpec())
    recovery: RecoverySpec = Field(default_factory=lambda: RecoverySpec())
    distil: DistilSpec | None = None
    lora: LoraSpec | None = None
    preference: PreferenceSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        """Choose the schedule of compiled or recomputed blocks where none is given.

        The backward of a compiled block is one program, and a split backward would keep for longer what is
        recomputed.
        """
        layout = given.get("layout", {}) if isinstance(given, dict) else None
        if isinstance(layout, Layout):
            layout = layout.model_dump(exclude_unset=True)
        if not isinstance(layout, dict) or "schedule" in layout:
            return given

        def value(table: str, key: str) -> Any:
            keys = given.get(table)
            return keys.get(key) if isinstance(keys, dict) else getattr(keys, key, None)

        whole = value("train", "compile") is True or value("recompute", "policy") not in (None, "none")
        return {**given, "layout": {**layout, "schedule": WHOLE_SCHEDULE}} if whole else given

    @property
    def trains_all(self) -> bool:
        """True if no parameter of the run is frozen."""
        return not self.train.frozen and self.lora is None

    @property
    def batch_sequences(self) -> int:
        """Samples of one optimiser step, over all ranks; after the batch's warm-up, as all that follow."""
        return self.train.batch_tokens // self.data.seq_len

    @property
    def shared_sequences(self) -> int:
        """The greatest number that divides the samples of every step; `batch_sequences` without a warm-up."""
        return gcd(*(stage.batch_tokens for stage in self.train.batch_stages)) // self.data.seq_len

    @property
    def rank_sequences(self) -> int:
        """Samples of one optimiser step that one data rank reads, after the batch's warm-up."""
        return self.batch_sequences // self.layout.data_ranks

    @property
    def micro_batch(self) -> int:
        """Samples of one microbatch: `layout.micro_batch`, or as many as stay within 8,192 tokens.

        A pipeline that has enough samples gets at least 2 x pp microbatches. All steps of a warm-up of the
        batch have microbatches of one size, and differ in their number.
        """
        if self.layout.micro_batch is not None:
            return self.layout.micro_batch
        most = max(1, 8192 // self.data.seq_len)
        if self.layout.pp > 1:
            most = min(most, max(1, self.rank_sequences // (2 * self.layout.pp)))
        shared = self.shared_sequences // self.layout.data_ranks
        return max(size for size in range(1, min(most, shared) + 1) if not shared % size)

    @property
    def microbatches(self) -> int:
        """Gradient accumulation: microbatches of a rank in an optimiser step, after the batch's warm-up."""
        return self.rank_sequences // self.micro_batch

    def at_step(self, number: int) -> Self:
        """The run in which all batches are as large as that of optimiser step `number`, from 1."""
        if not self.train.batch_warmup:
            return self
        batch = {"batch_tokens": self.train.batch_of_step(number), "batch_warmup": ()}
        train = self.train.model_copy(update=batch)
        layout = self.layout.model_copy(update={"micro_batch": self.micro_batch})
        return self.model_copy(update={"train": train, "layout": layout})

    @property
    def step_groups(self) -> int:
        """Groups of ranks that take steps by themselves (islands); 1 where all take each step together."""
        return self.layout.replicate if self.outer.every else 1

    @property
    def exchange_every(self) -> int:
        """Steps of a step group between its exchanges with the others; 0 where there are none."""
        return self.outer.every

    @property
    def own_step_group(self) -> int | None:
        """The step group that is a world of its own in this run; None for the world of all."""
        return self.outer.island

    @property
    def free_step_groups(self) -> bool:
        """True if all step groups of this run are worlds of their own, none of which waits for the others."""
        return self.outer.quorum is not None and self.outer.island is None

    @property
    def exchange_period(self) -> int:
        """Steps between two exchanges of a parameter over all step groups; 0 where there is one."""
        return self.outer.every

    @property
    def exchange_words(self) -> list[str]:
        """`outer.key=value` of each key of exchanges that is not the default."""
        if self.step_groups == 1:
            return []
        fields = OuterSpec.model_fields.items()
        values = ((key, getattr(self.outer, key), field.default) for key, field in fields)
        return [f"outer.{key}={value}" for key, value, default in values if value != default]

    def in_time(self, steps: int) -> dict[str, Any]:
        """Tables with such periods and delays that what they put off is used within so many steps."""
        return {"outer": self.outer.in_time(steps).model_dump(mode="json")}

    def together(self) -> Self:
        """The run whose ranks all take each step together, with its own gradients."""
        layout = self.layout
        if layout.replicate > 1:
            layout = layout.model_copy(update={"zero": max(1, layout.zero)})
        return self.model_copy(update={"outer": OuterSpec(), "layout": layout})

    @property
    def tables_of_models(self) -> dict[str, str]:
        """Table -> the further model, in a word or two, that it gives a run; `spec.other_models` reads it."""
        return {} if self.distil is None else {"distil": "a teacher"}

    @property
    def tables_of_steps(self) -> dict[str, str]:
        """Table -> what a step does for it besides the gradients of its batch, in a few words."""
        found = {table: f"learns from {model}" for table, model in self.tables_of_models.items()}
        if self.preference is not None:
            found["preference"] = "compares pairs of answers"
        if self.outer.every or self.outer.staleness or self.outer.island is not None:
            found["outer"] = "uses gradients later, or lets groups of ranks step apart"
        return found

    @property
    def uncounted_tables(self) -> dict[str, str]:
        """Table -> what predictions of time and memory do not count of it, in a few words."""
        return {
            table: f"{model}, or the loss that takes its answers"
            for table, model in self.tables_of_models.items()
        }

    @property
    def forwards_ahead(self) -> tuple[ForwardAhead, ...]:
        """The forwards without gradients that each step takes of its samples before it."""
        return () if self.preference is None else self.preference.forwards_ahead

    def in_forward(self, ahead: ForwardAhead) -> Self:
        """The run whose model a forward ahead of a step computes with."""
        return self.model_copy(update={"lora": None}) if ahead == "base" else self

    def plain(self) -> Self:
        """The run whose ranks step `together`, and learn from data alone."""
        return self.together().model_copy(update={"distil": None, "preference": None})

    @property
    def staleness(self) -> int:
        """Steps between the computation of gradients and their use."""
        return self.outer.staleness

    @property
    def staleness_lr_divisor(self) -> int:
        """Divisor of the learning rates of late gradients (Zhang et al. 2016, staleness-aware async-SGD)."""
        return max(1, self.staleness) if self.outer.staleness_lr == "inverse" else 1

    @property
    def world_size(self) -> int:
        """Ranks of this run's world: those of the layout, or of the step group that it trains."""
        return self.layout.world_size // (1 if self.own_step_group is None else self.step_groups)

    def of_step_group(self) -> Self:
        """The run of one step group by itself: its own ranks, and its share of each batch."""
        if self.step_groups == 1:
            return self
        count, train = self.step_groups, self.train
        share = {
            "batch_tokens": train.batch_tokens // count,
            "batch_warmup": tuple((size // count, -(-end // count)) for size, end in train.batch_warmup),
            "tokens": None if train.tokens is None else -(-train.tokens // count),
        }
        return self.model_copy(
            update={
                "layout": self.layout.model_copy(update={"replicate": 1}),
                "train": train.model_copy(update=share),
                "outer": OuterSpec(),
            }
        )


def staleness_in(tree: Mapping[str, Any]) -> int:
    """`Sections.staleness` of a run's record, which may be older than the key."""
    return int(tree.get("outer", {}).get("staleness", 0))
