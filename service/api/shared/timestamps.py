"""Times as texts."""

from datetime import UTC, datetime


def format_time(seconds: float) -> str:
    """Seconds since 1970 as RFC 3339 writes them, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
