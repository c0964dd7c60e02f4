"""Which samples to label next: what each candidate's label would change, in closed form, and the usual baselines."""

from .lookahead import LookAhead, look_ahead

__all__ = ["LookAhead", "look_ahead"]
