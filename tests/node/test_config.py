"""Flags of a node for the Redis protocol."""

from __future__ import annotations

import pytest

from koinon_node.config import RedisEndpoint, redis_endpoints
from koinon_proto.contract.errors import ConfigurationError


def test_each_keyspace_has_a_port_which_others_find_on_the_nodes_host() -> None:
    chosen = RedisEndpoint("default", "0.0.0.0:0", "h:0")
    assert redis_endpoints([""], [], "h", "0.0.0.0") == (chosen,)
    assert chosen.at_port(41).advertise == "h:41"
    assert RedisEndpoint("default", "h:1", "proxy:2").at_port(1).advertise == "proxy:2"
    listens, advertises = ["0.0.0.0:6379", "vip=0.0.0.0:6380", "a.b=[::]:6381"], ["vip=proxy:1"]
    assert redis_endpoints(listens, advertises, "h", "h") == (
        RedisEndpoint("default", "0.0.0.0:6379", "h:6379"),
        RedisEndpoint("vip", "0.0.0.0:6380", "proxy:1"),
        RedisEndpoint("a.b", "[::]:6381", "h:6381"),
    )
    assert redis_endpoints(["default=h:1"], ["h:2"], "h", "h") == (
        RedisEndpoint("default", "h:1", "h:2"),
    )


@pytest.mark.parametrize(
    ("listens", "advertises", "what"),
    [
        (["h:1", "h:2"], [], "'default' has two addresses"),
        (["h:1", "default=h:2"], [], "'default' has two addresses"),
        (["vip=h:1"], ["vip=h:1", "vip=h:2"], "'vip' has two addresses"),
        (["h:1"], ["vip=h:2"], "nothing listens for keyspace 'vip'"),
        ([], ["h:2"], "nothing listens for keyspace 'default'"),
        (["VIP=h:1"], [], "'VIP' must begin with a small letter"),
        (["=h:1"], [], "must begin with a small letter"),
    ],
)
def test_flags_that_contradict_one_another_are_refused(
    listens: list[str], advertises: list[str], what: str
) -> None:
    with pytest.raises(ConfigurationError, match=what):
        redis_endpoints(listens, advertises, "h", "h")
