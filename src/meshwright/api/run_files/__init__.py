"""Run files for what somebody has: `meshwright init`.

`holdings` tells text, chats, models and runs from one another, `budget` sizes a model and its training,
`places` says what it is trained on, `chats` looks how long chats are, `tuning` is for these, `draft` composes
the file, `commands` use it, and `new_run_file` is the verb.
"""
