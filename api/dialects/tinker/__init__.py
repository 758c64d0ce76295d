"""Speak the sampling half of Tinker's API. Its futures are jobs: api/routes/tinker.py serves it, and keeps nothing.

sample.py     a request to sample, to a job, and a future's name
reply.py      a job's result, to the message that the SDK reads
protobuf.py   the fields of such a message
"""
