"""What the command line can do, a file for each kind of command: each enters its parsers (`add`) and runs them."""
