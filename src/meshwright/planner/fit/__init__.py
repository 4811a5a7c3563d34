"""The ways in which a model fits GPUs of one node, trained or served, and what still fits.

`fit` answers a request, `ways` are those of training, `training` finds the layout and memory of each, and
`most` its longest sequences and largest microbatches; `serving` has weights and caches, `published` the
weights as they are published (MXFP4, blockwise fp8), `vllm` what that program takes besides, `bisection`
finds the most that fits, and `command` has the command lines that train and serve what was found.
"""
