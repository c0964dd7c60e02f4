"""What we measure: `python -m benchmarks.GROUP.NAME` from the root of the repository.

Where tangency is not installed: PYTHONPATH=src. Results, with command and machine, are in `results/`.
"""
