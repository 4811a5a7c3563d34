"""The address that other hosts reach this one at."""

from __future__ import annotations

import pytest

from meshwright.rank.network import own_address
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
