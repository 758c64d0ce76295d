"""The installed version of scorepool, which results and webhook requests report."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("scorepool")
except PackageNotFoundError:  # an uninstalled checkout on the import path
    VERSION = "uninstalled"
