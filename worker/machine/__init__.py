"""What a worker needs of its machine: tasks at intervals, an end for what hangs, notice before it sleeps."""
