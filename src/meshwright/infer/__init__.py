"""Generation and evaluation by a trained decoder, on any layout.

`generate` continues prompts: `sharded` is the decoder cut over ranks, `forward` one turn of it, `batching`
the requests that join and leave, `paged_cache` their keys and values, `sampling` the choice of a token,
`lookup` guesses of the next ones, and `packed_linears` the blocks of a decoder on a CPU. `scores` are
log-likelihoods, for the tasks of lm-eval in `harness`, and `quantisation_table` what each recipe costs.
`sample` shows what a run has learned; `soft_target_source` is another trained model's answers about a run's
samples.
"""

from meshwright.infer.generate import generate

__all__ = ["generate"]
