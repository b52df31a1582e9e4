"""The fingerprint of a partitioner: SHA-256 over its answers for 4,096 fixed keys.

Two processes with the same name for a partitioner may still answer otherwise: another version of a
router that is installed, another build. Its fingerprint is replicated with the cluster's settings,
and each process that hashes keys compares it with its own before the first write.

The keys are made so that each router that is built in, and each edge of it, has answers of its own:
every byte as a delimiter, up to the 16th; every length that a key may have; braces in all orders;
H3 cells of all resolutions, and what is almost one; bytes by chance. The keys and the form of the
answers are fixed for ever: 2 bytes for the length of the routing bytes, these, and the hash in 16
bytes, big-endian. The examples of a router from elsewhere follow in the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from hashlib import sha256
from itertools import chain, islice, product
from typing import Final

KEY_COUNT: Final = 4_096
_BRACES_MAX: Final = 6
_LONGEST: Final = 500


def fingerprint_of(
    routing_bytes: Callable[[bytes], bytes],
    hash_of: Callable[[bytes], int],
    examples: Iterable[bytes] = (),
) -> bytes:
    """Return the fingerprint, 32 bytes, of a router and the hash over its routing bytes."""
    answers = sha256()
    for key in chain(fixed_keys(), examples):
        routing = routing_bytes(key)
        answers.update(len(routing).to_bytes(2, "big"))
        answers.update(routing)
        answers.update(hash_of(routing).to_bytes(16, "big"))
    return answers.digest()


@cache
def fixed_keys() -> tuple[bytes, ...]:
    """Return the 4,096 keys."""
    keys = [*_delimited(), *_lengths(), *_braces(), *_cells()]
    keys += islice(_by_chance(), KEY_COUNT - len(keys))
    assert len(keys) == KEY_COUNT
    return tuple(keys)


def _delimited() -> list[bytes]:
    """Return a key for each byte that has it twenty times, at distances that differ."""
    return [b"".join(b"k" * (n % 3) + bytes((d,)) for n in range(20)) for d in range(256)]


def _lengths() -> list[bytes]:
    stream = b"".join(sha256(b"lengths %d" % n).digest() for n in range(16))
    return [stream[:n] for n in (*range(65), *range(65, _LONGEST + 1, 29), _LONGEST)]


def _braces() -> list[bytes]:
    words = (b"{", b"}", b"a")
    orders = (product(words, repeat=n) for n in range(1, _BRACES_MAX + 1))
    return [b"".join(order) for some in orders for order in some]


def _cells() -> list[bytes]:
    """Return some cells of each resolution, and keys that differ from one in one bit or digit."""
    keys = []
    for resolution in range(16):
        for n in range(8):
            digits = int.from_bytes(sha256(b"cell %d %d" % (resolution, n)).digest()[:6], "big")
            cell = 0x08 << 56 | resolution << 52 | (digits % 122) << 45
            for digit in range(1, 16):
                value = (digits >> 3 * digit) % 7 if digit <= resolution else 7
                cell |= value << 3 * (15 - digit)
            name = cell.to_bytes(8, "big")
            keys += [name, name + b"/rider/%d" % n, name[:7]]
            keys.append((cell ^ 1 << 63).to_bytes(8, "big"))
            keys.append((cell ^ 1 << 59 + n % 4).to_bytes(8, "big") + b"mode")
            keys.append((cell ^ 1 << 56 + n % 3).to_bytes(8, "big") + b"reserved")
            keys.append((cell | 127 << 45).to_bytes(8, "big") + b"base")
            keys.append((cell | 7 << 3 * (15 - 1 - n)).to_bytes(8, "big") + b"digit")
    return keys


def _by_chance() -> Iterator[bytes]:
    n = 0
    while True:
        drawn = sha256(b"key %d" % n).digest()
        yield drawn[1 : 1 + drawn[0] % 31]
        n += 1
