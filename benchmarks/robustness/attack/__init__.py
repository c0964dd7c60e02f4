"""Attacks on what is the user's: command lines, tampered files, kills and full disks while files are written."""
