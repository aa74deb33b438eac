"""Where commands find a server, unless they are told."""

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "POLYHEAD_URL"  # of the environment; no setting of a server
