"""Operators: attention, low precision and elementwise functions for CUDA and x86 processors.

Attention: `attention_intervals` describes masks, `attention_flash` computes on CUDA by the kernels that
`attention_backend` lets torch call, `attention_cpu` and its `attention_cpu_kernel` on processors, and
`partial_attention` on a part of the keys. `elementwise_cpu` and `half_precision_products` are the other
operators of processors: `cpu_kernels` compiles the C++ and `processor` says what it may use.
`score_changes` are soft caps and attention sinks, `low_precision` rounds to fp8, mxfp8 and nvfp4,
`low_precision_casts` lays what is rounded out for the products of GPUs,
`triton_operator` declares the operators whose kernels for CUDA are in `triton`: `cross_entropy` has those of
the loss, `expert_rows` gathers rows for experts and sums them on the way back.
`gradient_accumulation_fusion` adds products where gradients lie, `splitmix64` is the random numbers that no
layout changes, and `with_backward` attaches a backward.
"""
