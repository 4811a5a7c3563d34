"""Bytes of a rank.

`exact` counts those of this program, and `generic` those of any: `states` of parameters, activations
`in_flight`, and the `peak` of a step without a pipeline. `lower_bound` is what no layout is below, and
`host` what is in the memory of hosts.
"""
