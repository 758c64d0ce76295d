"""The versions of the packages that compute."""

from importlib.metadata import PackageNotFoundError, version


def installed_version(name: str) -> str:
    """Return the version of a package, or "uninstalled": this checkout may be on the import path only."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "uninstalled"
