"""Serve HTTP in front of the queue. All that this room knows of workers is what they register in Redis."""
