"""A decoder split over a mesh: one file per axis, the order they are applied in, and the parts of a step.

`parallelize` applies the axes in order; `stage` cuts the decoder into stages and units.

Data: `data_parallel` (replicas and ZeRO) gathers each `fsdp_unit`, whose parameters lie in the buffers of
`flat_param`, and `gradient_reduction` sums their gradients; `fp8_gather` gathers weights in 8 bits,
`quantised_weights` stores frozen ones in 8 and 4, and `microbatches` is a rank's part of a batch.
Tensor: `tensor_parallel` splits the layers of `tensor_linears`, with the messages of `fused_comm_ops`;
`tensor_lora` has the adapters of such layers, and `adapter_dropout` what they drop of their inputs;
`heads_norm` norms the queries of all ranks together, and `vocab_parallel` splits the embedding and the loss.
Context: `context_parallel` splits a sequence by `ring_attention` or `ulysses`.
Pipeline: `pipeline_parallel` runs a schedule; `deferred_wgrad` computes gradients of weights later.
Experts: `expert_parallel` sends tokens to their experts, in messages that `expert_buffers` may bound;
`router_balance` keeps the load of experts even.

Memory: `recompute` drops activations, for which `recompute_cache` keeps some results, and
`activation_offload` moves activations to the host.
Numbers: `precision` has the formats and the loss scale, `loss_normalization` every division, `grad_norm`
the gradient's norm, and `delayed_scaling` the scales of 8-bit formats. `loss_function` is a caller's loss of
log-probabilities.
Parts: `step_part` is the interface of a step's optional parts; `multi_token_prediction` is one, the loss of
further tokens, `preference` the loss of whole answers, by one of `preference_objectives` and with a reference
that may be a `stored_reference`, and `stale_gradients` are gradients that are applied some steps late.
"""
