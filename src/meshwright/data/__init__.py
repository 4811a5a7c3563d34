"""Text in, batches out, as a pure function of (seed, step).

Sources: `sources` finds the files of a corpus; `readers` turns them and the tables of `row_files` into
documents, as `hub_source` does data sets of the hub and `megatron` data sets that are tokenized already;
`given_rows` writes rows that a program has in memory, `synthetic` makes documents up, and `split` takes some
of them for validation.
Tokens: `tokenizer` (bytes, BPE that `bpe_training` learns, or a `tokenizer.json`, of which `literals` are
the special tokens and `vocabulary` finds ids beyond the model's). `words` splits texts by the rules of
`word_rule` and numbers them in a `word_table`; `text_processes` does so on all cores, by the `processes`
that answer each `job`.
Chats: `chat_formats` makes conversations of rows, and `near_formats` says what rows lack that almost are one;
`chat_template` renders them, `chat_turns` finds the assistant's turns where a template does not mark them,
and `chat_tokens` gives ids and what is trained on; `chat_source` is a corpus of them, and `chat_remarks` says
what some fail to teach.
Files: `tokenize` fills a folder by `shard_writer`; `manifest` is its format, `publish` its appearance
whole or not at all, `verification` and the record `verified` check it once, `block_reader` checks blocks
as they are read, `shards` reads tokens and `document_index` finds documents. `kept_tokenizer` is the
tokenizer that a run keeps.
Batches: `packing` makes samples of documents, and `whole_documents` those of chats, packed by `best_fit`, of
which two may be `pairs`, and `judged` those of answers with a label; `split_samples` has those of all
sources, `permutation` orders them without state, `mixture` weighs corpora, `corpus` is all of it for one
`RunSpec`, and `loader` makes one rank's batches.
"""
