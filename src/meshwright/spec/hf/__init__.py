"""Files of Hugging Face folders as values: `config.json`, and what tokenizers' files say.

`families` has a row for each family of models, `config_keys` what several of them share, and
`tensor_names` the names of their tensors. `config_read` reads a model's config, `config_rope` its positions,
and `json_object` checks keys as they are read. `tokenizer_json` and `tokenizer_classes`
check tokenizers, `text_tokens` says which tokens begin and end a text, and `special_tokens` which files tell
it.
"""
