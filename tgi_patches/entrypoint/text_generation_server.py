"""TGI's `text-generation-server` with the overlay: hooks for `serve`, everything else untouched.

Stands on PATH as `text-generation-server` where TGI's launcher looks it up by that name.
"""

from __future__ import annotations

import os
import sys

from tgi_patches.contract import SPEC_VARIABLE, STRICT_VARIABLE
from tgi_patches.entrypoint.on_import import on_import

_BAD_INPUT = 2


def main() -> None:
    if sys.argv[1:2] == ["serve"] and SPEC_VARIABLE in os.environ:
        # TGI's command sets up its log before it imports the server: hooks come right after that.
        on_import("text_generation_server.server", _install)
    from text_generation_server.cli import app

    sys.argv[0] = "text-generation-server"
    app()


def _install() -> None:
    try:
        from tgi_patches.hooks.install import install
    except ImportError as error:
        sys.stderr.write(f"The overlay cannot be imported and is not laid on: {error}.\n")
        if os.environ.get(STRICT_VARIABLE) == "1":
            sys.exit(_BAD_INPUT)
        return
    install(os.environ)


if __name__ == "__main__":
    main()
