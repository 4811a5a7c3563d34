"""Messages of a step, call by call, and the bytes that they add up to.

`messages` lists them, each a `message`, and `layer_messages` those of a layer and a microbatch, from the
sizes of `layer_shape`; `adapters` lists those of adapters of low rank, `preference` those of a loss of whole
answers, and `exchange` those of ranks that step apart.
"""
