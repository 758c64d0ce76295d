"""Keep what is done: a file with a journal beside it, or stdout."""
