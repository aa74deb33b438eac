"""What every request passes: host and origin, key, rate, admission, deadline, access log."""
