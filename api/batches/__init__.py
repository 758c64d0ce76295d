"""Batches: files of lines, each line an ordinary job at low priority, driven in turns by whichever API process is free.

    zset scorepool:batches   id -> when its next turn is due
    a turn                   claim: due in a lease, number + 1 | read, do some work, commit (fenced by the number) ... |
                             release: due soon

A turn keeps nothing that is not in Redis: a process that dies leaves the batch as of its last commit, and any other
goes on after the lease. A line's jobs have ids that follow from batch and line, and its entry is written in the
transaction that strikes it off, so that nothing is forgotten or told twice. The driver is here and not on a worker
because the translation of OpenAI's bodies is the API's.
"""
