"""Who asks and who answers: both prove the deployment's key over both challenges.  Pure.

A proof covers the side that gives it, both challenges, the frame's number on the connection and what
it says: it is of no use on another connection, in another place, or for the other side.
Where neither side has a key there are no proofs.
"""

from __future__ import annotations

from dataclasses import dataclass

from tgi_patches.key import sign, signed
from tgi_patches.pull.wire import Kind, WireError

_PULLER, _SERVER = "puller", "server"


@dataclass(frozen=True, slots=True)
class Session:
    """What the greetings of one connection settled."""

    key: bytes
    asked: bytes
    """The puller's challenge."""
    answered: bytes
    """The server's."""

    @property
    def proof_bytes(self) -> int:
        """At the end of every frame after the greetings, but for CHUNK and BROKEN."""
        return 64 if self.key else 0

    def request(self, number: int, kind: Kind, body: bytes) -> bytes:
        """The proof of the puller's frame `number`."""
        return sign(self.key, *self._parts(_PULLER, number, kind, body)).encode()

    def asked_for(self, payload: bytes, number: int, kind: Kind) -> bytes:
        """The body of the puller's frame.  Raises WireError unless it proves the key."""
        body, proof = self._cut(payload)
        self._check(proof, self._parts(_PULLER, number, kind, body))
        return body

    def answer(self, number: int, request: bytes, kind: Kind, body: bytes) -> bytes:
        """The proof of the server's answer to request `number`, whose body is `request`."""
        return sign(self.key, *self._parts(_SERVER, number, kind, body), request).encode()

    def answered_with(self, payload: bytes, number: int, request: bytes, kind: Kind) -> bytes:
        """The body of the server's frame.  Raises WireError unless it proves the key."""
        body, proof = self._cut(payload)
        self._check(proof, (*self._parts(_SERVER, number, kind, body), request))
        return body

    def _cut(self, payload: bytes) -> tuple[bytes, bytes]:
        at = max(0, len(payload) - self.proof_bytes)
        return payload[:at], payload[at:]

    def _parts(self, side: str, number: int, kind: Kind, body: bytes) -> tuple[str | bytes, ...]:
        return (side, self.asked, self.answered, str(number), kind.name, body)

    def _check(self, proof: bytes, parts: tuple[str | bytes, ...]) -> None:
        if not signed(self.key, proof.decode("ascii", errors="replace"), *parts):
            raise WireError("the key was not proved")
