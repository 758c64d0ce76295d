"""Are calls read back as they were written? Generates tools and calls, and writes them as templates do."""
