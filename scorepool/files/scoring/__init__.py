"""Score rows by jobs: what is scored of a row, the jobs, and the columns that follow."""
