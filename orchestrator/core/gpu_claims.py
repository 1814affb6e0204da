"""Which container has which GPU of a host, and which of two that want the same one gives way.

The engine is the ledger.  A container is created first and started only if no older one has its GPUs, so
that of two that come at the same time exactly one goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALL = "all"
"""In place of a GPU's name: the container sees every GPU of the host."""
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Claim:
    """One container's hold on one GPU."""

    gpu: str
    """UUID, MIG UUID, `ALL`, or an index that nobody could translate."""
    container: str
    deployment: str = ""
    """Empty for a container that is not ours."""
    mps_percent: int = 0
    """0: it shares the GPU with nobody."""
    memory_fraction: float = 0.0
    created_ns: int = 0
    """By the engine's clock."""
    container_id: str = ""

    @property
    def age(self) -> tuple[int, str]:
        """The smaller, the older; never equal for two containers."""
        return self.created_ns, self.container_id

    @property
    def shares(self) -> bool:
        return self.mps_percent > 0

    @property
    def named(self) -> bool:
        """By a UUID, or as no GPU of NVIDIA's is: not by an index."""
        return self.gpu.startswith(("GPU-", "MIG-")) or "=" in self.gpu

    def meets(self, other: Claim) -> bool:
        """Whether both may mean the same GPU: what is not known counts as the same."""
        same = self.gpu == other.gpu or ALL in (self.gpu, other.gpu)
        return same or self.named != other.named

    def __str__(self) -> str:
        return f"{self.container} of deployment {self.deployment}" if self.deployment else self.container


def refusal(mine: Iterable[Claim], held: Sequence[Claim]) -> str:
    """Why the container of `mine` must give way, in a sentence; empty when it may start."""
    for claim in mine:
        older = [
            other
            for other in held
            if other.container_id != claim.container_id and other.meets(claim) and other.age < claim.age
        ]
        if sentence := _refused(claim, older):
            return sentence
    return ""


def _refused(claim: Claim, older: Sequence[Claim]) -> str:
    alone = [other for other in older if not (other.shares and claim.shares)]
    if alone:
        return f"The GPU {claim.gpu} is taken by the container {alone[0]}{_how(alone[0], claim)}."
    percent = sum(other.mps_percent for other in older)
    fraction = sum(other.memory_fraction for other in older)
    if percent + claim.mps_percent <= 100 and fraction + claim.memory_fraction <= 1 + _ROUNDING:
        return ""
    holders = ", ".join(str(other) for other in older)
    return (
        f"The GPU {claim.gpu} is shared by the container {holders}: {percent} % of its threads and "
        f"{fraction:.3g} of its memory are taken, and {claim.mps_percent} % and {claim.memory_fraction:.3g} "
        "more do not fit."
    )


def _how(other: Claim, claim: Claim) -> str:
    """What the reader would not guess from the two names alone."""
    if other.gpu == ALL:
        return ", which has all GPUs of this host"
    if other.gpu != claim.gpu:
        return f", or may be: it has the GPU of index {other.gpu}, and which that is is not known"
    return ", which shares it" if other.shares else ""
