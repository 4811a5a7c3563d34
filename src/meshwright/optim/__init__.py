"""Optimisers over flat buffers, and what belongs to an update: clipping, learning rates, averages.

`optimisers` names the class of each: those of `optimiser`, `muon` and `adamw_8bit`, whose numbers `eight_bit`
packs. `offload` keeps moments in the host's memory or a file, `stochastic_rounding` updates weights in bf16.
`lr_schedule` is the rate of a step, `clipping` the limits of norms, and `ema` the average of the weights.
"""
