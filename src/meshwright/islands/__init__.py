"""Islands: replicas that train by themselves and exchange how far they moved (DiLoCo, Douillard et al. 2023).

`outer` is the exchange of islands that wait for each other and its optimiser, `outer_compression` what they
send in few bits. `outer_quorum` is the exchange of islands that wait for nobody, in the order that
`outer_log` agrees on in the files of `island_log`.
"""
