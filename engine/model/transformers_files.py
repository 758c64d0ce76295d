"""Let transformers look through its own files once when it is imported, not twice.

Its package and its subpackage `models` scan the same thousands of files, each for a third of a second of CPU time.
Import this before anything imports `transformers.models`.
"""

from pathlib import Path
from typing import Any

from transformers.utils import import_utils

_MODELS = Path(import_utils.__file__).parents[1] / "models"
_scan = import_utils.define_import_structure


def define_import_structure(module_path: str | Path, prefix: str | None = None) -> Any:
    """Scan a package. Name `models` by its folder, as transformers/__init__.py did: what it found is in a cache."""
    return _scan(_MODELS if Path(module_path) == _MODELS / "__init__.py" else module_path, prefix)


import_utils.define_import_structure = define_import_structure  # type: ignore[assignment] # of a cache
