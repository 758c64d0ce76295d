"""Python SDK and the `scorepool` command. Imports wire, and talks to the rest as any user would: HTTP and processes."""

from client.client import Client, JobFailed, ScorepoolError

__all__ = ["Client", "JobFailed", "ScorepoolError"]
