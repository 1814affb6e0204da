"""A stand-in for IPEX in plain torch: what TGI's server calls of it on a CPU, and nothing else.

With it on PYTHONPATH, TGI runs its flash path without a GPU.  It proves what TGI and the overlay do
around the kernels, not the numerics of any kernel.
"""

from __future__ import annotations

import sys

from . import distributed, llm

__all__ = ["distributed", "llm"]

if "text_generation_server" in sys.modules:
    # Not for a test that imports the functions alone.
    from . import server

    server.adapt()
