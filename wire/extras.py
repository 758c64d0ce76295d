"""Import modules that need packages of the extra `tables`, on first use."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def import_for(method: str, module: str, *packages: str) -> Any:
    """Return a module. Raises ImportError that says what to install if a package is missing."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise ImportError(f"`{method}` needs {' and '.join(missing)}: run `pip install 'scorepool[tables]'`")
    return import_module(module)
