"""Likelihood of texts and scores of tasks by a trained model, on one device or on the ranks of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from meshwright.api.generation import Axes, layout_keys, model_ranks, run_tokenizer
from meshwright.api.models import WEIGHTS, as_run, is_run_folder, not_of_ranks
from meshwright.api.options import Batch, Option, Weights, choice, completed, several, tokens, whole
from meshwright.api.ranks import Result, run_on_ranks
from meshwright.rank.env import worker
from meshwright.rank.scratch import scratch_folder
from meshwright.runs.record import read_run
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.load import Overrides
from meshwright.storage.remote import is_url, without_scheme

if TYPE_CHECKING:
    from meshwright.comm.mesh import Mesh
    from meshwright.data.corpus import Corpus
    from meshwright.data.split_samples import Split
    from meshwright.data.verification import Check
    from meshwright.infer.harness import Tasks
    from meshwright.infer.sharded import ShardedDecoder

MODULES = ("meshwright.infer.scores", "meshwright.data.corpus")
"""Modules that ranks need."""


def _named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError("a name and a path are needed, as in wiki=wiki.jsonl")
    return name, path


def _steps(text: str) -> str | tuple[int, ...]:
    return text if text == "all" else several(whole(0))(text)


class Evaluation(TypedDict, total=False):
    """Choices of an evaluation; see `evaluate`."""

    # fmt: off
    data: Annotated[Mapping[str, str | Path] | Sequence[tuple[str, str]], Option(
        "a text besides the run's held-out one, a file or a folder", "NAME=PATH", _named_path, (),
        repeated=True)]
    only_data: Annotated[bool, Option("leave out the run's held-out text", default=False)]
    step: Annotated[int | Sequence[int] | str | None, Option(
        "checkpoints of a run: 100, 100,200 or all; default the newest", "STEPS", _steps)]
    weights: Weights
    tokens: Annotated[int | None, Option(
        "most tokens of a text; default all, of the held-out one train.eval_tokens", "N", tokens())]
    seq_len: Annotated[int | None, Option(
        "tokens of a window; default those of the run's samples", "N", whole(1))]
    tasks: Annotated[str | Path | Sequence[str | Path], Option(
        "tasks of lm-eval with local data: a YAML file or a folder, then names of tasks in it",
        "PATH[,NAME]", several(str), ())]
    limit: Annotated[int | None, Option("examples of each task; default all", "N", whole(1))]
    batch: Batch
    special_tokens: Annotated[str | None, Option(
        "those that a text or a request spells: read as tokens, or as text; default read for tasks, and the "
        "run's data.special_tokens for texts", "read|text", choice("read", "text"))]
    # fmt: on


def texts_of(how: Evaluation) -> list[tuple[str, str]]:
    """Return the texts that are given, each with its name."""
    pairs = how["data"]
    return [(name, str(path)) for name, path in (pairs.items() if isinstance(pairs, Mapping) else pairs)]


def tasks_of(how: Evaluation) -> list[str]:
    """Return the path of tasks, and names of tasks in it."""
    tasks = how["tasks"]
    return [str(tasks)] if isinstance(tasks, str | Path) else [str(each) for each in tasks]


def evaluates_held_out(how: Evaluation) -> bool:
    """Return whether the run's own held-out text is evaluated."""
    return not how["only_data"] and (bool(how["data"]) or not how["tasks"])


def check_evaluation(how: Evaluation) -> None:
    """Raise `UserError` for a value that cannot be meant."""
    texts = texts_of(how)
    for name, path in texts:
        if [other for other, _ in texts].count(name) > 1:
            raise UserError(f"--data: the name '{name}' is given twice; give each text its own")
        if [other for _, other in texts].count(path) > 1:
            raise UserError(f"--data: {path} is given twice; give it once")
        if not is_url(path) and not Path(without_scheme(path)).exists():
            raise UserError(f"--data: there is no file or folder {path}; give NAME=PATH")
    if how["weights"] not in WEIGHTS:
        raise UserError(f"--weights: {how['weights']!r} is not one of {', '.join(WEIGHTS)}")
    for name in ("tokens", "seq_len", "limit", "batch"):
        value = how.get(name)
        if value is not None and not (type(value) is int and value > 0):
            raise UserError(
                f"--{name.replace('_', '-')}: {value!r} is not valid; give a whole number above 0"
            )
    if how["special_tokens"] not in (None, "read", "text"):
        raise UserError(f"--special-tokens: {how['special_tokens']!r} is not one of read, text")
    if how["only_data"] and not texts:
        raise UserError("--only-data: leaves out the run's held-out text; add a --data, or remove it")
    if how["limit"] is not None and not how["tasks"]:
        raise UserError("--limit: is how many examples of each of --tasks; add --tasks, or remove it")


def evaluate(run: Path, *, layout: Axes = (), **options: Unpack[Evaluation]) -> Result:
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
    return evaluate_run(Path(run), completed(Evaluation, options), layout_keys(layout)) or {}


def evaluate_run(run: Path, how: Evaluation, layout: Overrides = ()) -> Result | None:
    """Evaluate as `evaluate` does: start the ranks of the layout, or be one of a torchrun.

    The result is None on all ranks but the first.
    """
    check_evaluation(how)
    ranks = evaluation_ranks(run, how, layout)
    if worker() is not None and not is_run_folder(run):
        raise not_of_ranks(run)
    with scratch_folder() as scratch:
        source = as_run(run, scratch / "run")
        found = run_on_ranks(partial(evaluate_worker, source, how, layout), ranks, modules=MODULES)
    return found and {**found, "run": str(run)}


def evaluation_ranks(run: Path, how: Evaluation, layout: Overrides) -> int:
    """Return the number of ranks of an evaluation.

    Raises `UserError` as `model_ranks` does, and for what can be refused before any rank is started.
    """
    ranks = model_ranks(run, layout, how["weights"])
    is_run = (run / "run.json").is_file()
    if not is_run and how["step"] is not None:
        raise UserError(f"--step: {run} is an HF folder, which has one set of weights; remove --step")
    if evaluates_held_out(how) and not how["data"] and not has_held_out(run):
        raise UserError(
            f"{run}: was not trained on text that it could hold out; give --data NAME=PATH, or --tasks"
        )
    if is_run:
        steps_of(run, how["step"])
    if how["data"] or how["tasks"]:
        run_tokenizer(run)
    if how["tasks"] and worker() is None:
        open_tasks(how)
    return ranks


def has_held_out(run: Path) -> bool:
    """Return whether the folder is a run's whose data hold out text, and not an imported model's."""
    if not (run / "run.json").is_file() or "imported" in read_run(run).info:
        return False
    return load(run).data.val_fraction > 0


def steps_of(run: Path, steps: int | Sequence[int] | str | None) -> list[int]:
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
    steps = [steps] if isinstance(steps, int) else steps
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

    path, *names = tasks_of(how)
    return Tasks(Path(path), names)


def evaluate_worker(run: Path, how: Evaluation, layout: Overrides = ()) -> Result | None:
    """Evaluate a run as one rank of the world of torchrun, or alone; None on all ranks but the first."""
    from meshwright.infer.sharded import ShardedDecoder, spec_to_evaluate
    from meshwright.rank.world import mesh_of

    trained = load(run)
    positions = trained.model.max_seq_len
    if how["seq_len"] is not None and how["seq_len"] > positions:
        raise UserError(
            f"--seq-len: {how['seq_len']} tokens are more than the model's positions, model.max_seq_len = "
            f"{positions}; give at most {positions}"
        )
    data = trained.data.model_copy(update={"seq_len": how["seq_len"] or trained.data.seq_len})
    spec = spec_to_evaluate(trained.model, trained.precision, layout, data)
    rows: list[Result] = []
    with mesh_of(spec) as mesh:
        control = mesh.control
        texts = _Texts(run, how, trained, spec, mesh)
        tasks = control.together(lambda: open_tasks(how)) if how["tasks"] else None
        # Without a step, a damaged checkpoint makes way for the one before it.
        steps = control.together(lambda: steps_of(run, how["step"])) if how["step"] is not None else [None]
        model = ShardedDecoder(spec, mesh)
        for step in steps:
            state = model.load(run, trained, how["weights"] == "ema", step)
            row: Result = {"step": state["step"], "domains": texts.likelihoods(model, state)}
            if tasks is not None:
                from meshwright.infer.harness import DecoderLM

                tokenizer = run_tokenizer(run, how["special_tokens"] != "text")
                row["tasks"] = tasks.run(DecoderLM(model, tokenizer, how["batch"]), how["limit"])
            rows.append(row)
        if mesh.rank:
            return None
    facts = {"run": str(run), "weights": how["weights"], "layout": spec.layout.describe()}
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
        if evaluates_held_out(how) and has_held_out(self._run):
            own = open_sources(self._trained.model_copy(update={"data": self._data}), check)
            if any(own.pairs):
                raise UserError(
                    f"{self._run}: holds out pairs of answers, whose bits per byte say nothing; its "
                    "validations are in metrics.jsonl; give texts with --data NAME=PATH --only-data"
                )
            self._own = own
            self._digest = own.digest if how["seq_len"] is None else open_sources(self._trained, check).digest
            found.append((own.names, own.validation, how["tokens"] or self._trained.train.eval_tokens))
        for name, path in texts_of(how):
            if self._own is not None and name in self._own.names:
                raise UserError(f"--data: '{name}' is the name of the run's own text; give another name")
            found.append(((name,), self._given(path, check), how["tokens"]))
        return found

    def _given(self, path: str, check: Check) -> Split:
        """Return all of the text of --data."""
        from meshwright.data.corpus import open_sources
        from meshwright.data.manifest import shards_of
        from meshwright.data.shards import read_manifest, tokenizer_of

        file = self._run / "tokenizer.json"
        try:
            if (folder := shards_of(path)) is not None:
                given = tokenizer_of(folder, read_manifest(folder, "tokenize the text again"))
                if given.digest != run_tokenizer(self._run).digest:
                    raise UserError(
                        f"{path} was tokenized with another tokenizer than {file}; give the text itself, or "
                        "tokenize it with that file"
                    )
            changes = {"corpus": path, "mixture": {}, "tokenizer": str(file.resolve()), "val_fraction": 0.0}
            if self._how["special_tokens"] is not None:
                changes["special_tokens"] = self._how["special_tokens"]
            data = self._data.model_copy(update=changes)
            return open_sources(self._trained.model_copy(update={"data": data}), check).train
        except UserError as error:
            raise type(error)(f"--data: {str(error).removeprefix('data.corpus: ')}") from error

    def likelihoods(self, model: ShardedDecoder, state: Mapping[str, Any]) -> Result:
        """Return the likelihood of each domain by the weights of a checkpoint with this state."""
        from meshwright.infer.forward import no_token_dropped
        from meshwright.train.held_out import likelihoods
        from meshwright.train.nll import nll

        self._check_own(state)
        found: Result = {}
        score = partial(nll, model.pipeline, self._micro_batch)
        for names, reader, most in self._readers:
            with no_token_dropped(model.decoder):
                parts = likelihoods(reader, score, model.mesh, most)
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
