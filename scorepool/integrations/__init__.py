"""Classes for other projects' frameworks. Each module imports its framework, and nothing here imports them."""
