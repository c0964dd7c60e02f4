"""Functions with parameters that are taken apart into simpler ones, which have rules: `table.py` lists them."""
