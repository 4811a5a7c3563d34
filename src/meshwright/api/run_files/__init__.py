"""Run files for what somebody has: `meshwright init`.

`holdings` tells text, chats, models and runs from one another, `budget` sizes a model and its training,
`places` says what it is trained on, `draft` composes the file, and `new_run_file` is the verb.
"""
