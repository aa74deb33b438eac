"""Paths of routes that exist twice: by themselves, and below the path of a model (/models/{name}/predict)."""

VERSION_SEGMENT = "/v1/"


def is_below(path: str, prefix: str) -> bool:
    """Whether `path` is `prefix` or below it, in whole segments."""
    return path == prefix or path.startswith(prefix + "/")


def path_below_model(path: str) -> str:
    """The path that follows the name of a model: its last segment, or all from the last /v1 on; else empty."""
    if not path.startswith("/models/"):
        return ""
    start = path.rfind(VERSION_SEGMENT)
    return path[start:] if start > 0 else "/" + path.rpartition("/")[2]
