"""The version clients and operators are told."""

import importlib.metadata


def _installed_version() -> str:
    try:
        return importlib.metadata.version("polychip")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed


VERSION = _installed_version()
