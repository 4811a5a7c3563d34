"""Text in, batches out, as a pure function of (seed, step).

readers      files, folders, JSONL, parquet, hub  -> documents
tokenizer    byte, trained BPE, tokenizer.json    -> token ids
words        texts as numbered words, counted and encoded, by several processes
shards       token ids on disk, memory-mapped, every file under a SHA-256
packing      documents                            -> samples of seq_len tokens
permutation  step and slot                        -> sample, by a bijection without state
mixture      several corpora by weight
corpus       all of the above for one `RunSpec`
loader       one rank's batches
"""
