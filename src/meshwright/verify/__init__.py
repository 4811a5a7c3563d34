"""Equality of layouts with one device: the reference, the comparison, and what finds the cause.

`verify` compares in float64, `precision` in the run's own formats, `both` one after the other, `resume`
through a checkpoint, and `sweep` many layouts: those of `sweep_layouts`, a `covering` array. The folder
`reference` is one device.
The run that is compared: `narrow` makes it small, `tiles` cuts its tiles, `uneven` its targets, and
`drawn_models` are further models of it.
What is compared: `gather_state` has the state, `samples` the batches, `held_out` the validation,
`learning_rates` and `clip_factors` the numbers of steps, `skipped` the steps that change nothing,
`routing` the experts that are chosen, and `module_sums` the output of each module. `compare` finds the
first difference among `kinds` of values; `rounding` and `measured` say what rounding explains of it, and
`own_gradients` which updates are due to gradients as they were rounded.
"""
