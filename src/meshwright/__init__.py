"""Meshwright plans, trains and checks large language models on any mesh of devices.

Who asks: `cli` is the command line and `api` the Python interface. `testing` compares modules of other
programs.
A run: `spec` says what it is, `launch` starts and watches its ranks, `rank` is one of them, `train` is its
loop and step, `runs` its record, `report` its pages, and `chaos` the faults that are injected into it.
A step: `data` makes batches, `model` is the decoder on `kernels`, `parallel` splits it over the mesh of
`comm`, by the pipelines of `schedule`; `optim` updates it, `islands` and `distil` are parts of a step.
What becomes of a model: `checkpoint` stores it, `weights` loads, averages and rounds it, `exchange` reads
and writes formats of others, `infer` generates and evaluates.
What checks and predicts: `verify` compares with one device, `dryrun` runs one rank without the others,
`planner` finds layouts, for clusters of `hardware` that `profile` measures, with failures by
`reliability`.
Small: `storage` opens files wherever they are kept, `cpp_library` compiles C++, `atomic` replaces files,
`host` knows the processors, `units` formats, `version` says the commit.
"""

__version__ = "0.7.0"
