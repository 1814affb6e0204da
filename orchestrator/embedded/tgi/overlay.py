"""What the overlay in the server process says of itself, and the records that it exports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import ConfigError
from tgi_patches.bridge import ArenaError
from tgi_patches.bridge.files import make_directories
from tgi_patches.contract import Fingerprint, MissReason, ShardSpec
from tgi_patches.mailbox import MailboxReader, mailbox_path
from tgi_patches.report import Report, read_report, report_path
from tgi_patches.sidecar.records import Records

RANK = 0
NO_OVERLAY = "TGI's server runs without the overlay."
NOT_ARMED = "The overlay in TGI's server was not armed by its warmup."


class Overlay:
    """Files of one incarnation of one shard, seen from the process that plays its sidecar."""

    def __init__(self, spec: ShardSpec, epoch: int) -> None:
        self._spec = spec
        self._epoch = epoch
        directory = Path(spec.arena_dir)
        self._report_path = report_path(directory, spec.deployment, spec.shard, RANK)
        self._mailbox_path = mailbox_path(directory, spec.deployment, spec.shard, RANK)

    def prepare(self) -> None:
        """Make the folder that the server will write to; ConfigError where it must not be used."""
        try:
            make_directories(self._report_path)
        except ArenaError as error:
            raise ConfigError(str(error)) from error

    def report(self) -> Report | None:
        """Its newest report; None where this incarnation wrote none."""
        report = read_report(self._report_path)
        if report is None or (report.shard, report.epoch) != (self._spec.shard, self._epoch):
            return None
        return report

    def records(self, fingerprint: Fingerprint) -> Records:
        """For the sidecar: what this shard's server exported."""
        return Records(self._spec, self._epoch, lambda: fingerprint)

    def mailbox(
        self, published: Callable[[str], None], failed: Callable[[str, MissReason], None]
    ) -> MailboxReader:
        return MailboxReader(self._mailbox_path, published=published, failed=failed)

    def remove(self) -> None:
        """The server is gone: nobody reads these any more."""
        for path in (self._report_path, self._mailbox_path):
            with contextlib.suppress(OSError):
                path.unlink()


def unhooked(report: Report | None) -> str:
    """Why records do not flow, in a sentence; empty where they do."""
    if report is None:
        return NO_OVERLAY
    if not report.hooked:
        return report.note or NO_OVERLAY
    return "" if report.armed and report.fingerprint is not None else NOT_ARMED
