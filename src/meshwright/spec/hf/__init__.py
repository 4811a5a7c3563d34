"""Files of Hugging Face folders as values: `config.json`, and what tokenizers' files say.

`families` has a row for each `family` of models, with `tensor_names` of its files and `config_keys` that
several share; `other_layers` lists families that are not read. `config_read` reads a model's config, its
positions by `config_rope`, and `json_object` checks keys as they are read; `weight_names` looks a tensor up
among those of the files, and `safetensors_header` tells files that were cut. `tokenizer_json` and
`tokenizer_classes` check tokenizers, `text_tokens` says which tokens begin and end a text, and
`special_tokens` which files tell it; `chat_template_files` finds chat templates.
"""
