"""The layers of wide networks."""
