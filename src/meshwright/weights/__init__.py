"""Trained weights as a whole: loaded into any layout, averaged, merged, quantised, exported.

`exports` writes those of a run as HF folders, with a `model_card`, and as GGUF files.
`saved_weights` reads those of a run's checkpoint or of a folder, `load` puts them into a decoder, and
`initial_weights` into a new run, `resized` to its vocabulary, with `initial_adapters`; `adapters` merges a
run's own, and `checks` says whether a checkpoint is of the run. `average` and `merge`, by `merge_methods`,
make new ones of several; `quantise` rounds them, to nearest or by `gptq`.
"""
