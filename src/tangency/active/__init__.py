"""Which samples to label next: what each candidate's label would change, in closed form, and the usual baselines."""

__all__: list[str] = []
