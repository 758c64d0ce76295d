"""Refuse webhook URLs that could never be delivered to, while their author is still listening.

This is the shallow check: names are not resolved here. The delivery checks the address that it connects to.
"""

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

# Special ranges that `is_global` lets through: translations that carry any IPv4 address inside.
_TRANSLATED = (ip_network("64:ff9b::/96"), ip_network("64:ff9b:1::/48"), ip_network("2002::/16"))


def check(url: str, allow_private: bool) -> None:
    """Raises ValueError with a sentence that says what would be right."""
    if any(ord(character) <= 32 or ord(character) == 127 or character == "\\" for character in url):
        raise ValueError("a webhook URL has no spaces, control characters or backslashes")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"the webhook URL cannot be read: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError("a webhook URL begins with https://")
    if parts.scheme == "http" and not allow_private:
        raise ValueError("webhooks go to https:// only; the operator allows http with SCOREPOOL_WEBHOOK_ALLOW_PRIVATE")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a webhook URL carries no user name or password; verify the signature instead")
    if parts.fragment or url.endswith("#"):
        raise ValueError("a webhook URL has no #fragment")
    if port == 0:
        raise ValueError("the port of a webhook URL is between 1 and 65535")
    host = (parts.hostname or "").rstrip(".")
    if not host:
        raise ValueError("the webhook URL names no host")
    _check_host(host, allow_private)


def _check_host(host: str, allow_private: bool) -> None:
    address = literal_address(host)
    if address is None:
        try:
            host.encode("idna")
        except UnicodeError:
            raise ValueError("the host of the webhook URL is not a valid name") from None
        private = host == "localhost" or host.endswith((".localhost", ".local", ".internal"))
    else:
        private = not is_public(address)
    if private and not allow_private:
        raise ValueError(
            f"the host {host} of the webhook URL is not public; "
            "the operator allows such hosts with SCOREPOOL_WEBHOOK_ALLOW_PRIVATE"
        )


def literal_address(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is written as, also in the old forms (`127.1`, `0x7f000001`); None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        try:
            return IPv4Address(socket.inet_aton(host)) if host.isascii() else None
        except OSError:
            return None


def is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if any(address in network for network in _TRANSLATED if network.version == address.version):
        return False
    return address.is_global and not address.is_multicast
