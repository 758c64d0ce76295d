"""Score and generate with per-token logprobs on a pool of Macs: the Python SDK and the `scorepool` command.

The API, the worker and the engine are subpackages. Importing `scorepool` loads none of them, and loads the SDK only
when one of its names is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scorepool.files import FileError, Perplexity, compare_file, generate_file, perplexity, score_file
    from scorepool.sdk import (
        AsyncClient,
        AsyncJobHandle,
        BatchTimeout,
        Client,
        InvalidUrl,
        JobFailed,
        JobHandle,
        JobTimeout,
        MixedResults,
        NotScorepool,
        ScorepoolError,
        TokensRestarted,
        Unreachable,
    )
    from scorepool.webhook import WebhookError, verify_webhook
    from scorepool.wire import (
        Classification,
        Classify,
        ClassifyItem,
        Compare,
        Embed,
        Embedding,
        EmbedItem,
        Failure,
        Generate,
        Image,
        Job,
        Message,
        Provenance,
        Result,
        Score,
        ScoreItem,
        SequenceResult,
        ServedModel,
        Tokenize,
        Tool,
        ToolCall,
        ToolCallResult,
        Usage,
    )

__all__ = [
    "AsyncClient",
    "AsyncJobHandle",
    "BatchTimeout",
    "Classification",
    "Classify",
    "ClassifyItem",
    "Client",
    "Compare",
    "Embed",
    "EmbedItem",
    "Embedding",
    "Failure",
    "FileError",
    "Generate",
    "Image",
    "InvalidUrl",
    "Job",
    "JobFailed",
    "JobHandle",
    "JobTimeout",
    "Message",
    "MixedResults",
    "NotScorepool",
    "Perplexity",
    "Provenance",
    "Result",
    "Score",
    "ScoreItem",
    "ScorepoolError",
    "SequenceResult",
    "ServedModel",
    "Tokenize",
    "TokensRestarted",
    "Tool",
    "ToolCall",
    "ToolCallResult",
    "Unreachable",
    "Usage",
    "WebhookError",
    "compare_file",
    "generate_file",
    "perplexity",
    "score_file",
    "verify_webhook",
]

_MODULES = {
    **dict.fromkeys(
        (
            *("AsyncClient", "AsyncJobHandle", "Client", "JobFailed", "JobTimeout", "MixedResults", "ScorepoolError"),
            *("BatchTimeout", "InvalidUrl", "JobHandle", "NotScorepool", "TokensRestarted", "Unreachable"),
        ),
        "scorepool.sdk",
    ),
    **dict.fromkeys(
        ("FileError", "Perplexity", "compare_file", "generate_file", "perplexity", "score_file"), "scorepool.files"
    ),
    **dict.fromkeys(("WebhookError", "verify_webhook"), "scorepool.webhook"),
}  # the other names are those of scorepool.wire

if not TYPE_CHECKING:  # a module-level __getattr__ hides misspelt names from type checkers

    def __getattr__(name: str) -> object:
        """Import a public name on first use (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES.get(name, "scorepool.wire")), name)
