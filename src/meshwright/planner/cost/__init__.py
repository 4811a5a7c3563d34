"""Seconds of a training step.

`model` holds the cost models of a cluster, and `step` is the sum for a layout, of which `lower_bounds`
bounds a whole branch.
Compute: `kernels` times one operator, `layer_products` the products of a layer, `layer` all of it and
`embedding_head` both ends, `stages` those of a pipeline, `shared_cores` ranks on one host's cores,
`breakdown` keeps causes apart, `precision` has the recipes, `operator_bytes` what memory-bound operators move
on a GPU, and `trained` is the share that is left where parameters are frozen.
Messages: `collectives` times one, `published_messages` lists those of other programs, `data_parallel`
those of parameters and gradients, `tensor_overlap` those that products hide, `exchange` those of ranks that
step apart, and `expert_balance` is how uneven experts are.
The host: `host` launches operators, and its memory takes moments (`offload`) and activations
(`activation_copies`), of programs that name what they keep those of `remat`. `muon` is the update by Muon.
`software` has the programs whose runs were measured, `uncertainty` the intervals.
"""
