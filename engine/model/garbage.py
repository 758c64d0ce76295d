"""Free what modules of a model hold of each other, also in a process that keeps its objects out of collections."""

import gc


def collect() -> None:
    """Collect all that is no longer used. What `gc.freeze` has set aside is looked at too, and set aside again."""
    num_frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    num_immortal = gc.get_freeze_count()  # from Python 3.12 on a collection sets objects aside that are never freed
    if num_frozen > num_immortal:
        gc.freeze()
