"""Checks of hosts, network and disk before a run: is there anything it would fail of, or be slow by?

`examination` asks all of them in order, on every rank of a `world`, which ranks join by a `meeting`; each
answers with `finding`s, told once for all ranks that have them.
Before ranks meet: `limits` of open files, locked memory and /dev/shm, and `ports`. Once they have met:
`versions` and `clocks`, the `shared_folder` with its `free_space` and `disk_rate`, which host reaches which
(`reachability`), and by `timing` the `collectives` of each group and the `links` between hosts.
"""
