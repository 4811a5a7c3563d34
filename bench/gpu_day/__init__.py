"""The first day on GPUs: what is unknown until then, measured in ten or thirty minutes on one GPU or eight.

    make gpu-day MINUTES=10
    make gpu-day-rehearsal

Each part (`parts`) is a process of its own (`worker`) with a limit in seconds, which writes a file of
results after each thing that it has measured (`results`), so that what fails or takes too long takes nothing
else with it; `__main__` starts them in order and writes the page (`page`) after each.

`machine` has the facts of machine and software, `gpu_tests` the tests of tests/gpu, `verify_layouts` the
layouts that fit, `steps` training steps with their kernels (`profiles`), and `attention` and `products` the
rates of kernels (`kernel_clock`). `traces` are those of the steps as a dry run has them, recorded on a
machine without a GPU, and `differences` the operators whose counts or seconds are farthest from them.
`devices` is the device of a part: a GPU, or one that is faked, with which all of this runs anywhere. Then
times are those of the host and mean nothing.
"""
