"""Read and write the formats of files: rows, whatever the format."""
