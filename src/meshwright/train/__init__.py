"""Training: the step, the loop around it, and the state that checkpoints hold.

`step` is the step, with the `parts` that it may have, the `step_sums` over its ranks and its `step_result`;
`cuda_graphs` run its microbatches on GPUs, `nll` is its loss without gradients, and `loop` the run around it,
which `open_run` opens, from its `starting_point`. `state` is what a checkpoint holds, `saves` when one is
written, `job_end` when a run saves and ends by itself.
`validation` measures the likelihood of `held_out` text, `metrics` counts, `mfu` is the share of FLOP/s that
the model takes, `matmul_peak` what this machine reaches, `memory_use` what a process holds, and `callbacks`
are told. `digest` hashes parameters and samples, `reference_run` computes a stored reference,
`island_world` is the world that a run's ranks form, `signals` and `garbage_collection` are what happens
between steps, and the folder `guard` watches the numbers. For loops of others, `given_batch` reads their
batches, `accumulation` adds up gradients before a step, and `state_offload` frees a device's memory.
`magnitudes` are those of adapters as a run begins.
"""
