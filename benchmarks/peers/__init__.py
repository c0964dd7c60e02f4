"""Other libraries, each in a process (and where needed an environment) of its own."""
