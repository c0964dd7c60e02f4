"""Trying to break it: other people's models, kills and damage, a GPU."""
