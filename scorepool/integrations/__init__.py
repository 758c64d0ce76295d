"""Classes for other projects' frameworks. Each sub-package imports its framework, and nothing here imports them."""
