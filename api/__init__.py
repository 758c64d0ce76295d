"""Serve HTTP in front of the queue. This room knows of workers only what they register in Redis."""
