"""Dry runs: the real training step of any rank of any world, without the world and without memory.

`rank_step` is the step of one rank in a `fake_world`, with `even_routing` to experts, `memory_tracker` counts
its bytes, and `report` is what a user asks for. On a faked GPU `trace` has the `events` of a step in order,
`trace_counts` counts them, `races` finds accesses that no event orders, `capturable` what no CUDA graph can
hold, whose `graph_replays` are in a trace, too, and `kernel_shapes` has what products and attention compute.
`fused_products` are those that overlap with their own messages, part by part. `clocks` follows the host and
the streams in the `kernel_seconds` of a cluster, and `timeline` tells where the time goes.
"""
