"""Counter-based random numbers, keyed by row: a row's numbers depend only on its key, however rows are batched."""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_AT_ONCE = 1 << 14  # numbers, which fit into a core's cache: mixing is twice as fast


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014), in place on uint64."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def hashed(text: str) -> int:
    """A hash of `text`, below 2⁶⁴: the first 8 bytes of its blake2b."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def row_keys(seed: int, purpose: str, epoch: int | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(n,) uint64 keys of `rows` (n,) for one purpose. `epoch`: one number, or one for each row."""
    base = np.uint64(hashed(f"{seed}/{purpose}"))
    with np.errstate(over="ignore"):
        keys = _mix(np.asarray(epoch, dtype=np.uint64) * _GOLDEN + base)
        return _mix(keys + (np.asarray(rows).astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def noise_keys(seed: int, split: str, epoch: int | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(n,) uint64 keys of the noise for `rows` (n,) of a split. Noise at build uses epoch 0."""
    return row_keys(seed, f"noise/{split}", epoch, rows)


def random_bits(keys: np.ndarray, stream: int, count: int) -> np.ndarray:
    """(n, count) uint64: `count` independent numbers for each key, also independent of other `stream`s."""
    bits = np.empty((len(keys), count), dtype=np.uint64)
    rows = max(1, _AT_ONCE // max(1, count))
    with np.errstate(over="ignore"):
        start = _mix(keys + np.uint64(stream + 1) * np.uint64(0xD1342543DE82EF95))
        counters = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        for first in range(0, len(keys), rows):
            some = slice(first, first + rows)
            _mix(np.add(start[some, None], counters, out=bits[some]))
    return bits


def uniform(bits: np.ndarray, count: int | np.ndarray) -> np.ndarray:
    """int64 from 0 to `count` − 1, uniform up to 2⁻³², from the upper half of `bits` (uint64)."""
    return ((bits >> np.uint64(32)) * np.asarray(count, dtype=np.uint64) >> np.uint64(32)).astype(np.int64)


def permutation(key: int, size: int) -> np.ndarray:
    """A permutation of 0 … size − 1 (int64) that depends on `key` alone."""
    bits = random_bits(np.array([key], dtype=np.uint64), 0, size)[0]
    return np.argsort(bits, kind="stable")
