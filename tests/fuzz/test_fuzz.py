"""A minute of fuzzing: a bounded number of messages of every method, the same ones each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.campaign import Campaign, running
from tests.fuzz.messages import DENIED, METHODS, Method

EXAMPLES = 15


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    with running() as campaign:
        yield campaign
        campaign.check_memory()
        assert campaign.beside.operations > 100


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_fuzz_no_message_stops_a_process_or_shows_to_others(
    campaign: Campaign, method: Method
) -> None:
    campaign.fuzz(method, EXAMPLES, METHODS.index(method))
    campaign.check()


def test_fuzz_denies_only_what_there_is() -> None:
    assert set(DENIED) <= {method.name for method in METHODS}
