"""Time, memory and traffic of a run before it starts, and the search for its best layout, without torch.

`plan` makes the plans that users see, `cluster_plans` compares those of several clusters, `fit` says which
ways of training and serving fit some GPUs, `island_plans` makes plans for slow links, and `preset_figures`
those of the named models on one device. Folders: `search` finds layouts, `cost` has their seconds, `memory`
their bytes, `traffic` their messages; `explain` gives reasons and `validation` compares with measured runs.
`programs` says which layouts each program of `--stack` runs; `layout_space` enumerates layouts, whose
choices are in `layout_levels`, `rank_view` is what one rank sees of a run, `group_shapes` where its groups
lie, `activations`, with `activations_moe`, `activations_head`, `activations_linear`, `activations_lora` and
`activations_sizes`, what it keeps for the backward, and `simulated_pipeline` one step, action by action.
"""

OBJECTIVES = ("time", "cost", "longest-context", "largest-model")
"""Least seconds for a token, least money for a token, longest sequences, largest model that fits."""
