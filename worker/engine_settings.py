"""The engine's settings of a worker. `scorepool certify` has the same, so that it measures what is served."""

from collections.abc import Iterator
from contextlib import contextmanager

from scorepool.engine import REASONING_PARSERS, TOOL_PARSERS, EngineSettings
from scorepool.store import Settings, SettingsError, parse_drafts


def engine_settings(
    source: str, settings: Settings, name: str = "", weights_folder: str | None = None, weights_version: int = 0
) -> EngineSettings:
    """Return the settings of an engine for a folder or hub id, which is served as `name`. Raises SettingsError.

    `weights_folder` has other weights than its own.
    """
    draft = parse_drafts(settings.drafts).get(name)
    for name, value, known in (
        ("SCOREPOOL_TOOL_PARSER", settings.tool_parser, TOOL_PARSERS),
        ("SCOREPOOL_REASONING_PARSER", settings.reasoning_parser, REASONING_PARSERS),
    ):
        if value not in known:
            raise SettingsError(f"{name}={value!r}: expected one of {', '.join(known)}")
    if settings.ranks > 1 and settings.idle_unload_s:
        raise SettingsError(
            f"SCOREPOOL_RANKS is {settings.ranks} and SCOREPOOL_IDLE_UNLOAD_S {settings.idle_unload_s}: several ranks "
            "do not unload idle weights, so leave one of the two out"
        )
    with _as_settings_error():
        return EngineSettings(
            model=source,
            weights_folder=weights_folder,
            weights_version=weights_version,
            ranks=settings.ranks,
            dtype=settings.dtype,
            mode=settings.mode,
            max_batch_tokens=settings.max_batch_tokens,
            prefill_ms=settings.prefill_ms,
            max_running_rows=settings.max_running_rows,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            prefix_disk_bytes=settings.prefix_disk_bytes,
            prefix_folder=str(settings.state_folder() / "prefixes"),
            memory_bytes=settings.memory_bytes or None,
            speculation="draft" if draft else settings.speculation,
            draft=draft,
            speculation_tokens=settings.speculation_tokens,
            tries_load=settings.ranks == 1,  # a trial would be a rank too many
            load_marks=str(settings.state_folder() / "loads"),
            certificates=str(settings.certificate_folder()),
            require_certificate=settings.require_certificate,
            max_video_frames=settings.max_video_frames,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
            tool_repair=settings.tool_repair,
        )


@contextmanager
def _as_settings_error() -> Iterator[None]:
    """Raise SettingsError for settings that contradict each other."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(str(error)) from None
