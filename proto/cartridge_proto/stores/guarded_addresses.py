"""Which addresses a store may send its readers to.

Owns the order of networks and the check of a redirect. Refuses link-local addresses, those where
clouds give out credentials, and any step further inside.
"""

import ipaddress
import socket
from collections.abc import Callable, Iterable
from enum import IntEnum

from cartridge_proto.stores.interface import StoreError, StoreUnavailable

_METADATA = {
    ipaddress.ip_address(address)
    for address in ("100.100.100.200", "192.0.0.192", "168.63.129.16", "fd00:ec2::254")
}
"""Where clouds answer with credentials, outside the link-local networks."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Resolve = Callable[[str, int], list[str]]
"""Host and port -> IP addresses."""


class Network(IntEnum):
    """How far inside an address is; a redirect never leads to a smaller number."""

    LOOPBACK = 1
    PRIVATE = 2
    PUBLIC = 3


def check_redirect(origin: Iterable[str], target: Iterable[str], place: str) -> None:
    """Refuse a redirect to a more inner network than the store's own.

    Args:
        origin: addresses of the host that answered.
        target: addresses of the host it points to.
        place: the target, for the message.

    Raises:
        StoreError: some address of the target is link-local, a cloud's metadata service, or
            further inside than the origin.
    """
    origin_networks = [network_of(address) for address in origin]
    outermost = max((network for network in origin_networks if network), default=Network.PUBLIC)
    for address in target:
        network = network_of(address)
        if network is None or network < outermost:
            what = network.name.lower() if network is not None else "special"
            raise StoreError(f"a redirect to {place} is not followed: {address} is {what}")


def network_of(address: str) -> Network | None:
    """How far inside an address is; `None` for those that no store may point to."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip in _METADATA:
        return None
    if ip.is_loopback:
        return Network.LOOPBACK
    return Network.PUBLIC if ip.is_global else Network.PRIVATE


def resolve_host(host: str, port: int) -> list[str]:
    """Addresses of a host, by the system's resolver.

    Raises:
        StoreUnavailable: there is none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StoreUnavailable(f"{host}: no address: {error}") from error
    return [str(entry[4][0]) for entry in found]


def is_loopback_host(host: str) -> bool:
    """Whether a host is this machine by its spelling: `localhost` or a loopback address."""
    try:
        return host == "localhost" or network_of(host) is Network.LOOPBACK
    except ValueError:
        return False
