"""Checkpoints: the finished rows of jobs that run for long, so that a death costs only the rows in flight.

rows.py               which jobs have them, and a row as Redis keeps it. Pure
job_checkpoint.py     one run of a job: what Redis has of it, and what is new
checkpoint_store.py   Redis, by a thread of its own
"""
