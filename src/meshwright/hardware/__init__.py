"""Clusters and devices, with figures of datasheets or measurements.

`cluster` is devices and the hierarchy of groups that they form, `network` a cluster with another network.
`catalogue` has the devices that are known, with figures that are `sourced`, `hardware_file` reads and writes
those of `meshwright profile`, whose `measurements` it holds, and `find` finds any by name or file.
"""
