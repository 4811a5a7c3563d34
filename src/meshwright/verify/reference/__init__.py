"""Training steps of one device, written apart from what `meshwright verify` checks.

`steps.py` takes them. The model is in `decoder.py`, `rope.py`, `router.py`, `low_precision.py`,
`rounding.py`, `sums.py` and `distillation.py`. `weights.py` and `data.py` have what it starts from and reads,
`batches.py` and `schedule.py` the sizes and learning rates of steps. Updates are in `optimisers.py`,
`adamw8bit.py`, `groups.py` and `clipping.py`; islands and late gradients in `outer.py`, `compression.py` and
`staleness.py`.

No module here imports one of model, parallel, train, checkpoint or planner; a contract of imports holds it.
"""
