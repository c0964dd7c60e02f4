"""One HTML file that shows why a network decided as it did: no server, no network, nothing to install."""

from .build import build, place, write

__all__ = ["build", "place", "write"]
