"""One rank of a world: its environment, how it joins the others, and how it ends.

`env` reads the rank's place from what torchrun set, `launchers` from what srun or mpirun did, and
`joined_group` from a process group that there is already; `scheduler` knows the job that it is in. `child`
is its main program. `rendezvous` and `network` say where ranks meet and `host_rendezvous` where the
launchers of hosts do, `process_group` and `world` join them, and `auto_layout` plans a layout where none is
given. `device_defaults` are keys that the device decides, `gpu` is the one that a rank takes, and `machine`
tells where a run is. `shared_memory` is what a rank has in common with its supervisor, `processes` what the
kernel says of processes, `scratch` temporary folders. `failure`, `out_of_memory` and NCCL's
`flight_recorder` are the reports of ranks that end early.
"""
