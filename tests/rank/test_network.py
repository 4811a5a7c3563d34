"""The address that other hosts reach this one at."""

from __future__ import annotations

import socket

import pytest

from meshwright.rank import network
from meshwright.rank.network import interface_towards, own_address
from meshwright.spec import UserError


def test_all_loopback_addresses_are_this_host() -> None:
    address, interface = own_address("127.0.0.1")
    assert address == "127.0.0.1"
    assert own_address("127.0.0.2") == ("127.0.0.2", interface)


def test_another_host_s_address_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(UserError, match=r"^--address: 192.0.2.77 is not an address of this host; it has 127"):
        own_address("192.0.2.77")


@pytest.mark.parametrize("address", ["fd00::1", "::1", "[fd00::1]", "fe80::1%eth0"])
def test_an_ipv6_address_is_told_to_be_one(address: str) -> None:
    with pytest.raises(UserError, match=r"is an IPv6 address, and hosts meet over IPv4; this one has .*127"):
        own_address(address)


def test_the_interface_towards_a_host_is_known_where_this_hosts_name_leads_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outside = [address for address in network._addresses() if not address.startswith("127.")]
    if not outside:
        pytest.skip("this host has no address beside loopback")
    address = outside[0]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(2, 1, 6, "", ("127.0.1.1", 0))])
    assert interface_towards(address) == network._addresses()[address]
    assert interface_towards("127.0.0.1") is None
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(2, 1, 6, "", (address, 0))])
    assert interface_towards(address) is None  # gloo finds it by the name
