"""A peer that is not installed."""

from __future__ import annotations


class Missing(Exception):
    """The text says how to install it."""
