"""Hold jobs by leases: how many to claim, for how long, and whose are over. Knows no job functions and no loop."""
