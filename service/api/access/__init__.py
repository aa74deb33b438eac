"""Checks that every request passes: host and origin, key, rate limit, admission, deadline; and the access log."""
