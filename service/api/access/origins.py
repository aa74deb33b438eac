"""Checks for requests that browsers send on behalf of web pages: host names (DNS rebinding) and origins (CORS).

Both run before a key or a body is read.  `Host` must be a name of this server, so that a foreign name which was rebound
to its address reaches nothing.  The origin of a page must be the server's own or be listed in `cors_origins`; browsers
are told so by the headers of the Fetch standard.  Clients that are not browsers send neither `Origin` nor
`Sec-Fetch-Site`, and the second check does not affect them.
"""

import ipaddress
import re
from collections.abc import Mapping
from itertools import product

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Scope

from ...config.settings import Settings
from ...core.errors import ForeignOrigin, MisdirectedRequest, UnsupportedType
from ..http.request_head import REQUEST_ID_HEADERS
from .request_context import IGNORED_HEADER

WILDCARD = "*"
LOCAL_NAME = "localhost"
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
MAX_QUOTED_CHARS = 100  # characters of a header that an error repeats
# What a page may send to another origin without a preflight (CORS-safelisted types).
MULTIPART_TYPE = "multipart/form-data"
FORM_TYPES = frozenset({"text/plain", "application/x-www-form-urlencoded", MULTIPART_TYPE})
FILES_PATH = "/v1/files"
ALLOWED_METHODS = "GET, HEAD, POST, PUT, DELETE"
MAX_AGE_S = 7200  # how long a preflight may be cached; Chromium's maximum
# see service.api.access.rate_limit
QUOTA_HEADERS = tuple(product(("limit", "remaining", "reset"), ("requests", "tokens")))
EXPOSED_HEADERS = ", ".join(  # response headers that pages may read, besides the CORS-safelisted ones
    (
        *(*REQUEST_ID_HEADERS, "Retry-After", "WWW-Authenticate", IGNORED_HEADER, "Inference-Header-Content-Length"),
        *(f"X-RateLimit-{name}-{what}" for name, what in QUOTA_HEADERS),
        *(f"Anthropic-RateLimit-{what}-{name}" for name, what in QUOTA_HEADERS),
    )
)
FIELD_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]*")


class OriginPolicy:
    """The host names and origins that the settings allow.  Lives on the event loop thread."""

    def __init__(self, settings: Settings) -> None:
        self._hosts = frozenset(settings.allowed_hosts)
        # ".example.com" for "*.example.com"
        self._host_suffixes = tuple(host[1:] for host in self._hosts if host.startswith(f"{WILDCARD}."))
        self._origins = frozenset(settings.cors_origins)
        self._allows_any = WILDCARD in self._origins
        self._checks_hosts = bool(self._hosts)

    def add_bound_address(self, name: str, address: str) -> None:
        """Add `name`, the setting's name for the IP address `address` that the server is bound to."""
        if ipaddress.ip_address(address).is_loopback:
            self._checks_hosts = True
            self._hosts |= {strip_port(name)}

    def check_host(self, headers: Headers, scope: Scope) -> None:
        """Raises MisdirectedRequest for a foreign or empty name.  Requests without Host (HTTP/1.0) pass."""
        host = strip_port(headers.get("host", ""))
        if (
            "host" not in headers
            or not self._checks_hosts
            or WILDCARD in self._hosts
            or is_loopback_name(host)
            or host in self._hosts
        ):
            return
        own = str((scope.get("server") or ("",))[0]).removeprefix("::ffff:")
        if host == own:  # probes and Prometheus use a pod's address; an address cannot be rebound
            return
        if host.endswith(self._host_suffixes):
            return
        raise MisdirectedRequest(
            f"Host: {host[:MAX_QUOTED_CHARS]!r} is not a name of this server; it answers to localhost, to its address "
            "and to the names in its setting allowed_hosts. If clients shall use this name, add it there "
            "(--allowed-hosts)",
            param="Host",
        )

    def check_origin(self, method: str, headers: Headers) -> None:
        """Raises ForeignOrigin for a request of a page whose origin is neither this server's nor allowed."""
        origin, site = read_origin(headers), headers.get("sec-fetch-site", "")
        if self._allows_any or site == "same-origin":  # no page can set Sec-Fetch-Site; a proxy may have changed Host
            return
        if not origin and (site not in ("cross-site", "same-site") or is_navigation(method, headers)):
            return
        if origin in self._origins or is_own_origin(origin, headers.get("host", "")):
            return
        what = f"Origin: {origin[:MAX_QUOTED_CHARS]!r}" if origin else f"Sec-Fetch-Site: {site[:MAX_QUOTED_CHARS]!r}"
        raise ForeignOrigin(
            f"{what} says that a web page of another origin asks, and this server allows only the origins in its "
            "setting cors_origins; to allow that page, add its origin there (--cors-origins https://app.example.com)",
            param="Origin" if origin else "Sec-Fetch-Site",
        )

    def preflight_headers(self, method: str, headers: Headers) -> Mapping[str, str]:
        """The response headers for a preflight, after `check_origin`; empty if the request is not a preflight.

        All requested header fields are allowed: an allowed origin may use every route as any client may.
        """
        if method != "OPTIONS" or "access-control-request-method" not in headers or not self._is_allowed(headers):
            return {}
        response_headers = {"Access-Control-Allow-Methods": ALLOWED_METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        requested = headers.get("access-control-request-headers", "")
        if requested and FIELD_NAMES.fullmatch(requested):
            response_headers["Access-Control-Allow-Headers"] = requested
        if headers.get("access-control-request-private-network") == "true":
            response_headers["Access-Control-Allow-Private-Network"] = "true"
        return response_headers

    def add_cors_headers(self, headers: Headers, answer: MutableHeaders) -> None:
        """Add the CORS headers to the headers of a response, including errors and streams."""
        if not self._origins:
            return
        answer.add_vary_header("Origin")
        if self._is_allowed(headers):
            answer["Access-Control-Allow-Origin"] = WILDCARD if self._allows_any else read_origin(headers)
            answer["Access-Control-Expose-Headers"] = EXPOSED_HEADERS

    def _is_allowed(self, headers: Headers) -> bool:
        origin = read_origin(headers)
        return bool(origin) and (self._allows_any or origin in self._origins)


def check_content_type(headers: Headers, path: str) -> None:
    """Raises UnsupportedType for a content type that any web page could send without a preflight.

    A body without a type passes: a browser sends such a body only with an Origin, which is checked. So does the form
    with a file, where files are sent.
    """
    for given in headers.getlist("content-type"):
        kind = given.partition(";")[0].strip().lower()
        if kind in FORM_TYPES and (path, kind) != (FILES_PATH, MULTIPART_TYPE):
            raise UnsupportedType(
                f"Content-Type: {given[:MAX_QUOTED_CHARS]!r} is not accepted, since any web page can send it; send "
                "JSON as application/json (curl: add -H 'Content-Type: application/json')",
                param="Content-Type",
            )


def read_origin(headers: Headers) -> str:
    """The header Origin.  Several values are joined, which matches no allowed origin; an empty one is "null"."""
    given = headers.getlist("origin")
    return ", ".join(given).lower() or ("null" if given else "")


def is_navigation(method: str, headers: Headers) -> bool:
    """Whether the user follows a link to this server.  The page with the link cannot read the response."""
    navigates = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return method in ("GET", "HEAD") and navigates


def is_own_origin(origin: str, host: str) -> bool:
    """Whether `origin` is that of pages of `host`.  A proxy in front may have terminated TLS."""
    scheme, _, authority = origin.partition("://")
    port = DEFAULT_PORTS.get(scheme, "")
    return bool(port and authority) and authority.removesuffix(port) == host.lower().removesuffix(port)


def strip_port(host: str) -> str:
    """The host name or address in a header Host: in lower case, without brackets, port and trailing dot."""
    name = host.lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    if name.count(":") < 2:  # else an IPv6 address
        name = name.partition(":")[0]
    return name.removesuffix(".")


def is_loopback_name(name: str) -> bool:
    """Whether it is a name or an address of this machine, which no DNS server can reassign (RFC 6761)."""
    if name == LOCAL_NAME or name.endswith(f".{LOCAL_NAME}"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
