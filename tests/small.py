"""Small runs for tests: a spec from dotted flags, with dots written as double underscores."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.parallel.mesh import Mesh
from meshwright.spec import RunSpec, load

MODEL = {"layers": 2, "hidden": 32, "ffn": 40, "heads": 4, "kv_heads": 2}


def spec_of(base: Mapping[str, object], **flags: object) -> RunSpec:
    """A run of the small model with `base` (dotted keys) and `flags` laid over it."""
    given = {f"model.{key}": value for key, value in MODEL.items()} | dict(base)
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in given.items()])


def first_batches(spec: RunSpec, mesh: Mesh, steps: int) -> list[Batch]:
    """This rank's batches of the first steps."""
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
    batches = [loader.step(step) for step in range(steps)]
    loader.close()
    return batches
