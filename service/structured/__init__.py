"""Structured output: grammars compiled to masks of tokens, and tried in a child process first."""
