"""Measured rates of this machine: products, attention, memory, collectives.

`profile` measures all, with `compute` on one device and `links` between ranks, by the `clock`. `machine`
describes the device, and `cgroup` the limits of its container.
"""
