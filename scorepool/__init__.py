"""Score and generate with per-token logprobs on a pool of Macs: the Python SDK and the `scorepool` command.

The API, the worker and the engine are subpackages. Importing `scorepool` loads none of them, and the SDK itself only
when one of its names is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scorepool.client import Client, JobFailed, ScorepoolError
    from scorepool.wire import Generate, Score

__all__ = ["Client", "Generate", "JobFailed", "Score", "ScorepoolError"]

_MODULES = {
    "Client": "scorepool.client",
    "JobFailed": "scorepool.client",
    "ScorepoolError": "scorepool.client",
    "Generate": "scorepool.wire",
    "Score": "scorepool.wire",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
