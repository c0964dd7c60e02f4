"""Do two samples come from one distribution, and which samples are outliers: tests and scores with any kernel."""

__all__: list[str] = []
