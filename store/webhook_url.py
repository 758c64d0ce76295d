"""The rules for URLs of webhooks and of images, against server-side request forgery. The only definition of them.

The API refuses an invalid URL when it is registered. `worker/webhooks` checks the URL again before each delivery, and
ssrf_guard.py the resolved address with `is_public`. Names are not resolved here. This module lies in `store/` because
`api/` and `worker/` may both import it from here only.
"""

import re
import socket
from importlib import resources
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import ClassVar, Self
from urllib.parse import urlsplit

from msgspec import Struct

# IANA's special-purpose registries as of 2026, written out because Python's `is_global` differs between patch releases
# and accepts multicast and the IPv4 translation prefixes.
_NOT_PUBLIC_4 = [
    ip_network(network)
    for network in (
        "0.0.0.0/8",  # this network; 0.0.0.0 reaches the host itself
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; also cloud metadata
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local; also cloud metadata
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/3",  # multicast, reserved, broadcast
    )
]
# The global unicast range of IPv6. Loopback, mapped and compatible IPv4, NAT64, ULA, link-local, site-local and
# multicast are outside it.
_UNICAST_6 = ip_network("2000::/3")
_NOT_PUBLIC_6 = [
    ip_network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: any IPv4 address, private ones too
        "3fff::/20",  # documentation
    )
]

_NAME = re.compile(r"[a-z0-9_.-]{1,253}")
# Names under other top-level domains (a.lan, kubernetes.default.svc, printer.local, x.home.arpa) are those of private
# networks. `example` is reserved for documents and belongs to nobody.
_LIST = resources.files("scorepool.store").joinpath("top_level_domains.txt").read_text()
_TOP_LEVEL_DOMAINS = {line for line in _LIST.splitlines() if not line.startswith("#")} | {"example"}


class OutboundUrl(Struct, frozen=True, kw_only=True):
    """A URL of a client, parsed once, so that the connection goes to the host and port that were checked."""

    article: ClassVar[str]
    noun: ClassVar[str]
    allow: ClassVar[str]  # how the operator allows what is not public
    scheme: str
    host: str  # ASCII, no brackets around IPv6, no trailing dot
    port: int
    target: str  # path and query

    @classmethod
    def parse(cls, url: str, allow_private: bool = False) -> Self:
        """Parse and check a URL; raise ValueError with the rule that it breaks. The error never contains the query."""
        name = f"{cls.article} {cls.noun}"
        if any(ord(character) <= 32 or ord(character) == 127 or character == "\\" for character in url):
            raise ValueError(f"{name} has no spaces, control characters or backslashes")
        try:
            split = urlsplit(url)
            port = split.port
        except ValueError:
            raise ValueError(f"the {cls.noun} is invalid: expected https://host[:port]/path?query") from None
        if split.scheme not in ("http", "https"):
            raise ValueError(f"{name} begins with https://")
        if split.scheme == "http" and not allow_private:
            raise ValueError(f"{name} begins with https://, not with http://; {cls.allow}")
        if "@" in split.netloc:
            raise ValueError(f"{name} has no user name or password")
        if "#" in url:
            raise ValueError(f"{name} has no #fragment")
        if not (split.path + split.query).isascii():
            raise ValueError(f"the path and query of {name} are ASCII; percent-encode other characters")
        if port is None:
            port = 443 if split.scheme == "https" else 80
        if port < 1024 and port not in (80, 443):
            raise ValueError(f"the port of {name} is 80, 443, or between 1024 and 65535")
        target = (split.path or "/") + (f"?{split.query}" if split.query else "")
        return cls(scheme=split.scheme, host=cls._host(split.hostname or "", allow_private), port=port, target=target)

    @classmethod
    def _host(cls, written: str, allow_private: bool) -> str:
        """Return the host as ASCII; raise ValueError unless it is a public address or a name that may be public."""
        try:  # IDNA first: it also converts digits and dots of other scripts to ASCII
            host = written if ":" in written else written.encode("idna").decode().rstrip(".").lower()
        except UnicodeError:
            raise ValueError(f"the host of the {cls.noun} is not a valid name") from None
        address = literal_address(host)
        if address is not None:
            public = is_public(address)
            host = str(address)
        elif _NAME.fullmatch(host):
            public = "." in host and host.rpartition(".")[2] in _TOP_LEVEL_DOMAINS
        else:
            raise ValueError(f"the {cls.noun} has no valid host")
        if not (public or allow_private):
            raise ValueError(
                f"the host {host} of the {cls.noun} is not an address or a name on the internet; {cls.allow}"
            )
        return host


class WebhookUrl(OutboundUrl, frozen=True, kw_only=True):
    """The URL of a webhook."""

    article = "a"
    noun = "webhook URL"
    allow = "the operator allows it with SCOREPOOL_WEBHOOK_ALLOW_PRIVATE"


class ImageUrl(OutboundUrl, frozen=True, kw_only=True):
    """The URL of an image."""

    article = "an"
    noun = "image URL"
    allow = "the operator allows it with SCOREPOOL_FETCH_IMAGES=any"


def literal_address(host: str) -> IPv4Address | IPv6Address | None:
    """Return the address that a host spells, including old forms (`127.1`, `0x7f000001`); None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        try:
            return IPv4Address(socket.inet_aton(host))
        except OSError:
            return None


def is_public(address: str | IPv4Address | IPv6Address) -> bool:
    """True if the address is routed on the internet. False if it cannot be parsed."""
    try:
        address = ip_address(address)
    except ValueError:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    if address.scope_id is not None:
        return False
    return address in _UNICAST_6 and not any(address in network for network in _NOT_PUBLIC_6)
