"""One HTML file that shows why a network decided as it did: no server, no network, nothing to install."""

from .build import build, page_path, write

__all__ = ["build", "page_path", "write"]
