"""Likelihood of texts and scores of tasks by a trained model, on one device or on the ranks of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.generation import Axes, Generation, generation_ranks, layout_keys, run_tokenizer
from meshwright.api.models import WEIGHTS, as_run, is_run_folder, not_of_ranks
from meshwright.api.ranks import Result, run_on_ranks
from meshwright.rank.env import worker
from meshwright.rank.scratch import scratch_folder
from meshwright.runs.record import read_run
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.load import Overrides

if TYPE_CHECKING:
    from meshwright.comm.mesh import Mesh
    from meshwright.data.corpus import Corpus, Split
    from meshwright.data.verification import Check
    from meshwright.infer.harness import Tasks
    from meshwright.infer.sharded import ShardedDecoder

MODULES = ("meshwright.infer.scores", "meshwright.data.corpus")
"""Modules that ranks need."""


@dataclass(frozen=True)
class Evaluation:
    """Choices of an evaluation; see `evaluate`."""

    data: tuple[tuple[str, str], ...] = ()
    only_data: bool = False
    steps: str | tuple[int, ...] | None = None
    weights: str = "trained"
    tokens: int | None = None
    seq_len: int | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    batch: int = 16
    special_tokens: str | None = None

    def __post_init__(self) -> None:
        names = [name for name, _ in self.data]
        for name, path in self.data:
            if names.count(name) > 1:
                raise UserError(f"--data: the name '{name}' is given twice; give each text its own")
            if [other for _, other in self.data].count(path) > 1:
                raise UserError(f"--data: {path} is given twice; give it once")
            if not Path(path).exists():
                raise UserError(f"--data: there is no file or folder {path}; give NAME=PATH")
        if self.weights not in WEIGHTS:
            raise UserError(f"--weights: {self.weights!r} is not one of {', '.join(WEIGHTS)}")
        for name in ("tokens", "seq_len", "limit", "batch"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value > 0):
                raise UserError(
                    f"--{name.replace('_', '-')}: {value!r} is not valid; give a whole number above 0"
                )
        if self.special_tokens not in (None, "read", "text"):
            raise UserError(f"--special-tokens: {self.special_tokens!r} is not one of read, text")
        if self.only_data and not self.data:
            raise UserError("--only-data: leaves out the run's held-out text; add a --data, or remove it")
        if self.limit is not None and not self.tasks:
            raise UserError("--limit: is how many examples of each of --tasks; add --tasks, or remove it")

    @property
    def held_out(self) -> bool:
        """True if the run's own held-out text is evaluated."""
        return not self.only_data and (bool(self.data) or not self.tasks)


def evaluate(
    run: Path,
    *,
    data: Mapping[str, str | Path] | None = None,
    step: int | Sequence[int] | str | None = None,
    tasks: Path | Sequence[str | Path] = (),
    layout: Axes = (),
    **options: Any,
) -> Result:
    """Return the likelihood of texts, and the scores of tasks, by a run's checkpoints or by an HF folder.

    The texts are the run's own held-out ones by source, and those of `data`, {name: file or folder}. `step`
    is one of the run's checkpoints, several of them or 'all', by default the newest. `tasks` is a file or a
    folder of tasks of lm-eval, or such a path and names of tasks in it; alone, it takes the place of the
    held-out text. `layout` is such as {"layout.tp": 2}; its ranks are started. The options are `weights`
    ('trained' or 'ema'), `tokens` (the most tokens of a text), `seq_len` (tokens of a window, by default
    those of the run's samples), `only_data` (True leaves out the held-out text), `limit` (examples of a
    task), `batch` (16: the most texts that are continued at a time on a data rank) and `special_tokens`
    ('read' or 'text': what becomes of those that texts of `data` and requests of tasks spell; by default that
    of the run's `data.special_tokens` for texts, and 'read' for tasks, as in lm-eval).

    The result has `run`, `weights`, `layout` and `checkpoints`, a list of `step`, `domains` ({name: loss,
    bits_per_byte, perplexity, tokens, bytes}) and `tasks` ({name: metrics}). Raises `UserError`.
    """
    steps = (step,) if isinstance(step, int) else step if isinstance(step, str | None) else tuple(step)
    named = [tasks] if isinstance(tasks, str | Path) else tasks
    how = Evaluation(
        data=tuple((name, str(path)) for name, path in (data or {}).items()),
        steps=steps,
        tasks=tuple(map(str, named)),
        **options,
    )
    found = evaluate_run(Path(run), how, layout_keys(layout))
    return found or {}


def evaluate_run(run: Path, how: Evaluation, layout: Overrides = ()) -> Result | None:
    """Evaluate as `evaluate` does: start the ranks of the layout, or be one of a torchrun.

    The result is None on all ranks but the first.
    """
    ranks = evaluation_ranks(run, how, layout)
    if worker() is not None and not is_run_folder(run):
        raise not_of_ranks(run)
    with scratch_folder() as scratch:
        source = as_run(run, scratch / "run")
        found = run_on_ranks(partial(evaluate_worker, source, how, layout), ranks, modules=MODULES)
    return found and {**found, "run": str(run)}


def evaluation_ranks(run: Path, how: Evaluation, layout: Overrides) -> int:
    """Return the number of ranks of an evaluation.

    Raises `UserError` as `generation_ranks` does, and for what can be refused before any rank is started.
    """
    ranks = generation_ranks(run, layout, Generation(weights=how.weights))
    is_run = (run / "run.json").is_file()
    if not is_run and how.steps is not None:
        raise UserError(f"--step: {run} is an HF folder, which has one set of weights; remove --step")
    if how.held_out and not how.data and not has_held_out(run):
        raise UserError(
            f"{run}: was not trained on text that it could hold out; give --data NAME=PATH, or --tasks"
        )
    if is_run:
        steps_of(run, how.steps)
    if how.data or how.tasks:
        run_tokenizer(run)
    if how.tasks and worker() is None:
        open_tasks(how)
    return ranks


def has_held_out(run: Path) -> bool:
    """Return whether the folder is a run's whose data hold out text, and not an imported model's."""
    if not (run / "run.json").is_file() or "imported" in read_run(run).info:
        return False
    return load(run).data.val_fraction > 0


def steps_of(run: Path, steps: str | tuple[int, ...] | None) -> list[int]:
    """Return the steps of checkpoints: the newest, 'all' up to it, or some, in order.

    Raises `UserError` naming the steps that there are.
    """
    from meshwright.checkpoint.directory import latest_step, published

    folder = load(run).checkpoint.folder(run)
    there, newest = list(published(folder)), latest_step(folder)
    if newest is None:
        raise UserError(f"{run}: has no checkpoint yet ({folder} holds none); train it first")
    if steps is None:
        return [newest]
    if isinstance(steps, str):
        if steps != "all":
            raise UserError(f"--step: {steps!r} is not valid; give a step, several such as 100,200, or all")
        return [step for step in there if step <= newest]  # later ones were given up
    for step in steps:
        if step not in there:
            raise UserError(
                f"--step: {folder} has no checkpoint of step {step}; it has {', '.join(map(str, there))}"
            )
    return sorted(set(steps))


def open_tasks(how: Evaluation) -> Tasks:
    """Return the tasks of an evaluation. Raises `UserError`, also where lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise UserError("--tasks: needs lm-eval, which is not installed; run pip install 'meshwright[eval]'")
    from meshwright.infer.harness import Tasks

    return Tasks(Path(how.tasks[0]), how.tasks[1:])


def evaluate_worker(run: Path, how: Evaluation, layout: Overrides = ()) -> Result | None:
    """Evaluate a run as one rank of the world of torchrun, or alone; None on all ranks but the first."""
    from meshwright.infer.sharded import ShardedDecoder, spec_to_evaluate
    from meshwright.rank.world import mesh_of

    trained = load(run)
    positions = trained.model.max_seq_len
    if how.seq_len is not None and how.seq_len > positions:
        raise UserError(
            f"--seq-len: {how.seq_len} tokens are more than the model's positions, model.max_seq_len = "
            f"{positions}; give at most {positions}"
        )
    data = trained.data.model_copy(update={"seq_len": how.seq_len or trained.data.seq_len})
    spec = spec_to_evaluate(trained.model, trained.precision, layout, data)
    rows: list[Result] = []
    with mesh_of(spec) as mesh:
        control = mesh.control
        texts = _Texts(run, how, trained, spec, mesh)
        tasks = control.together(lambda: open_tasks(how)) if how.tasks else None
        # Without a step, a damaged checkpoint makes way for the one before it.
        steps = control.together(lambda: steps_of(run, how.steps)) if how.steps is not None else [None]
        model = ShardedDecoder(spec, mesh)
        for step in steps:
            state = model.load(run, trained, how.weights == "ema", step)
            row: Result = {"step": state["step"], "domains": texts.likelihoods(model, state)}
            if tasks is not None:
                from meshwright.infer.harness import DecoderLM

                tokenizer = run_tokenizer(run, how.special_tokens != "text")
                row["tasks"] = tasks.run(DecoderLM(model, tokenizer, how.batch), how.limit)
            rows.append(row)
        if mesh.rank:
            return None
    facts = {"run": str(run), "weights": how.weights, "layout": spec.layout.describe()}
    return {**facts, "seq_len": spec.data.seq_len, "checkpoints": rows}


class _Texts:
    """The texts of an evaluation, open on a rank: the run's held-out ones, and those of --data."""

    def __init__(self, run: Path, how: Evaluation, trained: RunSpec, spec: RunSpec, mesh: Mesh) -> None:
        from meshwright.data.loader import SplitReader
        from meshwright.rank.world import once_per_host

        self._run, self._how, self._trained, self._data = run, how, trained, spec.data
        self._micro_batch = spec.micro_batch
        self._own: Corpus | None = None
        self._digest = ""
        once_per_host(mesh.control, lambda: self._open("files"))
        splits = mesh.control.together(lambda: self._open("lazy"))
        place = mesh.data_rank, spec.layout.data_ranks
        self._readers = [(names, SplitReader(split, spec, *place), most) for names, split, most in splits]

    def _open(self, check: Check) -> list[tuple[Sequence[str], Split, int | None]]:
        """Return the names of domains, the split that has them as its sources, and the most targets of it."""
        from meshwright.data.corpus import open_sources

        found: list[tuple[Sequence[str], Split, int | None]] = []
        how = self._how
        if how.held_out and has_held_out(self._run):
            own = open_sources(self._trained.model_copy(update={"data": self._data}), check)
            self._own = own
            self._digest = own.digest if how.seq_len is None else open_sources(self._trained, check).digest
            found.append((own.names, own.validation, how.tokens or self._trained.train.eval_tokens))
        for name, path in how.data:
            if self._own is not None and name in self._own.names:
                raise UserError(f"--data: '{name}' is the name of the run's own text; give another name")
            found.append(((name,), self._given(path, check), how.tokens))
        return found

    def _given(self, path: str, check: Check) -> Split:
        """Return all of the text of --data."""
        from meshwright.data.corpus import open_sources
        from meshwright.data.manifest import is_shards
        from meshwright.data.shards import read_manifest, tokenizer_of

        file = self._run / "tokenizer.json"
        try:
            if is_shards(Path(path)):
                given = tokenizer_of(Path(path), read_manifest(Path(path), "tokenize the text again"))
                if given.digest != run_tokenizer(self._run).digest:
                    raise UserError(
                        f"{path} was tokenized with another tokenizer than {file}; give the text itself, or "
                        "tokenize it with that file"
                    )
            changes = {"corpus": path, "mixture": {}, "tokenizer": str(file.resolve()), "val_fraction": 0.0}
            if self._how.special_tokens is not None:
                changes["special_tokens"] = self._how.special_tokens
            data = self._data.model_copy(update=changes)
            return open_sources(self._trained.model_copy(update={"data": data}), check).train
        except UserError as error:
            raise type(error)(f"--data: {str(error).removeprefix('data.corpus: ')}") from error

    def likelihoods(self, model: ShardedDecoder, state: Mapping[str, Any]) -> Result:
        """Return the likelihood of each domain by the weights of a checkpoint with this state."""
        from meshwright.infer.forward import no_token_dropped
        from meshwright.train.held_out import likelihoods
        from meshwright.train.step import nll

        self._check_own(state)
        found: Result = {}
        score = partial(nll, model.pipeline, self._micro_batch)
        for names, reader, tokens in self._readers:
            with no_token_dropped(model.decoder):
                parts = likelihoods(reader, score, model.mesh, tokens)
            found |= {name: part.to_json() for name, part in zip(names, parts, strict=True) if part.tokens}
        return found

    def _check_own(self, state: Mapping[str, Any]) -> None:
        """Raise `UserError` unless the text is what the checkpoint's training held out."""
        own = self._own
        if own is None:
            return
        remedy = "put it back, or give --data NAME=PATH with --only-data"
        trained_with = state.get("tokenizer_sha256")
        if state["data_digest"] not in (None, self._digest):
            raise UserError(
                f"{self._run}: its text is not that of the checkpoint of step {state['step']} (data digest "
                f"{state['data_digest'][:12]}, now {self._digest[:12]}), so what was held out is not known; "
                f"{remedy}"
            )
        if own.has_text and trained_with not in (None, own.tokenizer.content_sha256):
            raise UserError(
                f"{self._run}: its text now gives another tokenizer than that of the checkpoint of step "
                f"{state['step']}; {remedy}"
            )
