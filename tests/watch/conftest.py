"""A browser for the page."""

from browsing import axe, browser  # noqa: F401 - fixtures
