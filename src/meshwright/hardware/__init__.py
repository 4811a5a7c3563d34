"""Clusters and devices, with figures of datasheets or measurements.

`cluster` is the type, `network` gives one another network, `find` looks one up by name: in the
`catalogue`, whose tables in `data` are read by `sourced`, or as a `hardware_file`. `measurements`
interpolates what `meshwright profile` measured. `attention_backend` chooses the kernels of attention on a
device.
"""
