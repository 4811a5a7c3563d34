"""The search for the best layout.

`request` is the user's question and `problem` one search for it, `branch_and_bound` searches the `tree`,
whose branches `branch_bounds` and `data_floor` bound, and `least_memory` says when there is nothing to
search. `results` are the layouts found, `simplest` which of
those near the fastest comes first, `objectives` the longest sequences or the largest model, and `infeasible`
the reason why nothing fits.
"""
