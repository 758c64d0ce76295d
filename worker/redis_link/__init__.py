"""Talk to Redis over a link that may be slow, far or broken. Knows no jobs."""
