"""What the overlay in the server process says of itself, and the records that it exports."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path

from orchestrator.errors import ConfigError
from tgi_patches.ballot import ballot_path
from tgi_patches.bridge import ArenaError
from tgi_patches.bridge.files import make_directories
from tgi_patches.contract import Fingerprint, ShardSpec
from tgi_patches.mailbox import mailbox_path
from tgi_patches.report import report_path
from tgi_patches.sidecar import Sidecar
from tgi_patches.sidecar.describe import Reports
from tgi_patches.sidecar.mail import listening
from tgi_patches.sidecar.records import Records


class Overlay:
    """Files of one incarnation of one shard, seen from the process that plays its sidecar."""

    def __init__(self, spec: ShardSpec, epoch: int) -> None:
        self.reports = Reports(spec, epoch)
        self._spec = spec
        self._epoch = epoch
        where = (Path(spec.arena_dir), spec.deployment, spec.shard)
        self._ballot = ballot_path(*where)
        self._of_ranks = [
            path(*where, rank) for rank in range(spec.tensor_parallel) for path in (report_path, mailbox_path)
        ]

    def prepare(self) -> None:
        """Make the folder that the server will write to; ConfigError where it must not be used."""
        try:
            make_directories(self._ballot)
        except ArenaError as error:
            raise ConfigError(str(error)) from error

    def records(self, fingerprint: Fingerprint) -> Records:
        """For the sidecar: what this shard's server exported."""
        return Records(self._spec, self._epoch, lambda: fingerprint)

    def listening(self, sidecar: Sidecar, records: Records) -> AbstractContextManager[None]:
        """What the server posts reaches `sidecar` inside the block."""
        return listening(self._spec, sidecar, records)

    def remove(self) -> None:
        """The server is gone: nobody reads these any more."""
        for path in (self._ballot, *self._of_ranks):
            with contextlib.suppress(OSError):
                path.unlink()
