"""Files of Hugging Face folders as values: `config.json`, and what tokenizers' files say.

`config_read` reads a model's config by the tables of `config_keys`, and `json_object` checks keys as they are
read. `tokenizer_json` and `tokenizer_classes` check tokenizers,
`text_tokens` says which tokens begin and end a text, and `special_tokens` which files tell it.
"""
