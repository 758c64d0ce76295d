"""The versions of the packages that compute."""

from importlib.metadata import PackageNotFoundError, version

_OF_IMAGES = ("av", "mlx-vlm", "pillow", "transformers")


def installed_version(name: str) -> str:
    """Return the version of a package, or "uninstalled": this checkout may be on the import path only."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "uninstalled"


def image_versions() -> dict[str, str]:
    """Return the versions of what decodes, resizes and encodes images and videos."""
    return {name: installed_version(name) for name in _OF_IMAGES}
