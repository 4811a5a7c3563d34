"""Ranks are started, watched and started again here, for every verb.

`supervisor` supervises the ranks of a host: `zygote` forks them, `start` is one start of all of them, and
`call` the program of each. `hang` and `slow` find ranks that do not move or hold others up,
`stalled_collective` the collective that a run hangs in, and `restarts` says what is tried again. Before that
`health_probe` has the host examined by the program `health_checks`. With `elastic` hosts leave and join, by
what they agree on (`membership`) in files (`membership_folder`) or in a store (`membership_store`), which one
of them holds (`store_holder`) until another has to (`store_terms`); `island_supervisor` supervises step
groups that are worlds of their own.
"""
