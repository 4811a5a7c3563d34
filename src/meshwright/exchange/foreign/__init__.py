"""Checkpoints of other programs in, nothing of which is executed.

`source` recognises a format by its files and opens a model with its weights; its errors are in the words of
the `caller`. Formats are stores of tensors by name: `dcp` reads directories of torch's distributed
checkpoints, `deepspeed` ZeRO's and universal ones, and `peft` merges adapters onto their base. Names of
programs are tables of `naming`: `torchtitan`, `megatron` and `litgpt`, the last two with their configs and
with fused rows, which `query_groups` puts in order.
"""
