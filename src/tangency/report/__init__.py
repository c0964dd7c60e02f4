"""One HTML file that shows why a network decided as it did: no server, no network, nothing to install."""

from .build import build, write

__all__ = ["build", "write"]
