"""What the layers of a network hold: probes of each, the last one at its optimum, and shifts of the data they see."""

__all__: list[str] = []
