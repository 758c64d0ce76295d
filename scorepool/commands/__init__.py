"""The subcommands of `scorepool` that talk to an API: jobs, models, status.

running     NEEDS, exit statuses, errors; imports typer only
remote      the subcommands' options; executes the modules below on first use
on_files    the subcommands that work on files; scorepool/files implements them
evaluations the subcommands that compare models on files
corpus_table  the table of `scorepool perplexity`
jobs        list, show and cancel jobs
models      what live workers serve
status      what an API serves and has to do, from /v1/models and /metrics
connecting  a client, and a sentence for each of its errors
top         the same as a screen that refreshes
"""
