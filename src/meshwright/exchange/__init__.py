"""Formats of others: Hugging Face folders, checkpoints of other programs, and GGUF files.

`hf` reads and writes folders: `hf_config` writes their config, `hf_files` finds their tensors,
`hf_state_dict` makes parameters of them, `hf_quantised` stores quantised layers as compressed-tensors does,
`hf_block_scaled` reads weights whose blocks share a scale, and `hf_tokenizer` copies tokenizers.
`dcp_file` writes tensors as torch's distributed checkpoints. `foreign` reads what other programs save, `hub`
fetches models. These read tensors from a `tensor_store`, and `stored_weights` makes parameters of them:
`torch_files` are those that `torch.save` writes, by `restricted_pickle`.
`peft_adapter` writes adapters for PEFT, with those of `peft_experts`, and `peft_reader` reads them.
Tensors that are written come from a `parameter_source`; `hf_shards` deals them into files, each a
`safetensors_stream`. `hf_stream` hands tensors to other programs in memory, and takes theirs.
`gguf_file` writes a file for llama.cpp, with `gguf_metadata` and `gguf_tokenizer`; `llama_cpp_graphs` has
what llama.cpp computes.
"""
