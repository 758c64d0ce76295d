"""Run batches: files of lines, each line one or more jobs at low priority, driven by whichever API process is free.

    zset scorepool:batches   batch id -> time at which the batch is due
    claim                    lease the batch that is due longest: due again after the lease, turn + 1
    read, work, commit       any number of times; a commit is refused if the turn has changed since the claim
    release                  due again soon

All state is in Redis: if a process dies, the batch stays as its last commit left it, and any other process continues
after the lease. The ids of a line's jobs follow from batch and line. The line's output is written in the transaction
that removes the line from those in progress, so no line is lost or answered twice. The driver runs in the API and not
in a worker because the API translates OpenAI's bodies.
"""
