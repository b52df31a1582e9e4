"""Scrapes a process's metrics endpoint, as Prometheus would, for tests."""

from __future__ import annotations

import re
import ssl
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_TYPE = re.compile(r"# TYPE (\S+) (\S+)")
_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Scrape:
    """The result of one scrape: the text, samples by name, and each family's type."""

    text: str
    samples: dict[str, dict[frozenset[tuple[str, str]], float]]
    types: dict[str, str]

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of the metric's samples with these labels among theirs."""
        wanted = set(labels.items())
        found = [v for of, v in self.samples.get(name, {}).items() if wanted <= of]
        return sum(found)

    def labels(self, name: str) -> set[str]:
        """Return the names of the labels of a family's samples, but for a histogram's bound."""
        names = (name, *(name + suffix for suffix in _SUFFIXES))
        of_all = (of for one in names for of in self.samples.get(one, ()))
        return {label for of in of_all for label, _ in of} - {"le"}


def scrape(address: str, timeout_s: float = 60.0, context: ssl.SSLContext | None = None) -> Scrape:
    """Scrape the endpoint at ``host:port``, by HTTPS with a context."""
    url = f"{'https' if context else 'http'}://{address}/metrics"
    with urllib.request.urlopen(url, timeout=timeout_s, context=context) as reply:
        return parsed(reply.read().decode())


def parsed(text: str) -> Scrape:
    """Take a text apart."""
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            of_name = samples.setdefault(sample.name, {})
            labels = frozenset(sample.labels.items())
            assert labels not in of_name, f"twice: {sample}"
            of_name[labels] = sample.value
    return Scrape(text, samples, dict(_TYPE.findall(text)))
