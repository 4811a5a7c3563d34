"""Messages between ranks: the mesh and its groups, collectives, and the store, with what watches over them.

`mesh` and `process_groups` say which ranks form a group, `collectives` starts what they send to each other,
which a `traffic_counter` records, `shared_memory_group` is the group of ranks of one host's processors.
`store_server` is the server of a run's keys and values, which listens at a `store_endpoint`, `store_client`
a client, and `store` the one that torch uses. `authentication` keeps strangers out of it and of `mailbox`,
which passes tensors between worlds. `control` sends small messages between all ranks, `heartbeat` tells the
supervisor where a rank is and `collective_log` which collectives it has finished, `waiting` is long work of
some ranks, and `call_check` and `checksum` compare what ranks call and hold.
"""
