"""Files of corpora, exports and checkpoints, wherever they are kept.

`stored_file` is the interface of a file that can be sized and opened at any byte, and the files of disks,
`remote` those that fsspec reaches, `compressed` those in gzip or zstd. `upload` writes new folders and files
where fsspec reaches, and `remote_folder` is one whose files come and go.
"""
