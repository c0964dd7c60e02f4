"""What the command line can do, a file for each kind of command: each enters its parsers (`add`) and runs them.

What computes is imported by what runs: torch takes a second, and `--help`, `--version` or a mistyped word need none.
"""
