"""Load the Lua scripts that every process runs in Redis."""

from importlib import resources

_FOLDER = resources.files("scorepool.store").joinpath("lua")


def load(*names: str) -> str:
    """Return the sources of `store/lua/<name>`, joined in this order: helpers first, the script last."""
    return "\n".join(_FOLDER.joinpath(name).read_text() for name in names)
