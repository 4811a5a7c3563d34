"""The guard over a run's numbers: what is skipped, rolled back or found corrupted.

`guard` is what the loop asks after each step. `spikes` finds spikes of the loss, `nonfinite` where a number
that is not finite came from, with the `trace` of a step that is computed `aside`. `vote` compares replicas,
and `replay` computes a batch twice to tell whose fault a difference is.
"""
