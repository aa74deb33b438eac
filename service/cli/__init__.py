"""The command line: a module for each command, and shared output."""
