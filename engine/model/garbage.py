"""Free what modules of a model hold of each other, also in a process that keeps its objects out of collections."""

import gc


def collect() -> None:
    """Collect all that is no longer used. What `gc.freeze` has set aside is looked at too, and set aside again."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
