"""The 64-bit mixing function behind repeatable noise. Not for security."""

from __future__ import annotations

MASK64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """Scramble an int into 64 well-spread bits (the finaliser of SplitMix64, Steele et al. 2014)."""
    value = (value + GOLDEN_GAMMA) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)
