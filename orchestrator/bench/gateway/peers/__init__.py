"""The gateways that ours is compared with, each as a good engineer would put it up."""

from __future__ import annotations
