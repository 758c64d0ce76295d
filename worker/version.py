"""The version that results and requests are stamped with."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("scorepool")
except PackageNotFoundError:  # a checkout on the import path
    VERSION = "uninstalled"
