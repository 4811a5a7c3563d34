"""One readable decoder, its loss, and initial weights that no layout can change. No collectives here.

`decoder` is embedding, blocks and `head`; `hooks` lists the operations that a layout replaces.
`block`: `attention` and its kinds `attention_gqa` and `attention_mla`, with the positions of `rope`; `mlp`,
or `moe` with a `router`, a `token_dispatcher` and the `experts` by `grouped_mm` and `expert_activations`; and
`norm`.
Ends: `embedding`, and `chunked_cross_entropy`, beside which `soft_targets` is the loss of a student,
`multi_token_prediction` that of further tokens, and `log_probs` is what losses of callers are of, and
`preference_loss` of pairs of answers.
Layers: `linear`, whose products `low_precision_linear` may round, on GPUs by the kernels of
`scaled_products`; `quantisation` rounds trained weights,
and `dynamic_linear` rounds inputs as they come; `lora` puts adapters beside them, with `lora_dropout`,
and those of `expert_lora` beside experts; `blockwise_quantisation` rounds frozen weights.
`init` draws the initial weights.
"""

from meshwright.model.decoder import Decoder

__all__ = ["Decoder"]
