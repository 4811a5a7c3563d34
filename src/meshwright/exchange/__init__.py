"""Formats of others: Hugging Face folders and GGUF files.

`hf` reads and writes folders: `hf_config` writes their config, `hf_files` finds their tensors,
`hf_state_dict` makes parameters of them, `hf_quantised` stores quantised layers as compressed-tensors does,
and `hf_tokenizer` copies tokenizers. Tensors that are written come from a `parameter_source`; `hf_shards`
deals them into files, each a `safetensors_stream`.
`gguf_file` writes a file for llama.cpp, with `gguf_metadata` and `gguf_tokenizer`; `llama_cpp_graphs` has
what llama.cpp computes.
"""
