"""Simulate fleets of 10 to 10,000 workers from the costs of one Redis, which are measured in the same run.

costs.py       Redis's CPU time of each message of a worker, by how many workers and leases there are
simulation.py  discrete events: submissions, claims, steps, ends, tokens, polls, heartbeats, silent workers
real_run.py    30 real workers with a paced engine, which check the simulation
__main__.py    the tables
"""
