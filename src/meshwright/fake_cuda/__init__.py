"""A CUDA device on machines that have none, for tensors without memory: a dry run takes the path of a GPU.

`library` compiles `device.cpp` and loads it before torch. `runtime` stands for `torch.cuda`: the name and the
capability of the device, its streams and events, which tell a `StreamObserver` what is asked of them. A
process has the device from its start or never: `process` starts one. `inductor` lets torch's compiler write
programs for the device, and runs them.
"""
