"""What the server tells of itself before the load begins."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .checks import LoadError
from .client import UNREACHED, Client, Target
from .lengths import Limits
from .texts import code, prose

SAMPLE_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Server:
    """Limits in tokens, and how long a token is in our own texts."""

    limits: Limits
    prose_characters: float
    code_characters: float
    """Characters per token, of the server's own tokenizer."""

    @classmethod
    def asked(cls, target: Target) -> Server:
        """From `/info` and `/tokenize`.  Raises LoadError."""
        client = Client(target)
        try:
            info = client.ask("/info")
            limits = Limits(int(info["max_input_tokens"]), int(info["max_total_tokens"]))
            rng = Random(0)
            # Half of the longest prompt at most, even where every character is a token.
            length = min(SAMPLE_CHARACTERS, max(64, limits.max_input_tokens // 2))
            return cls(limits, _per_token(client, prose(rng, length)), _per_token(client, code(rng, length)))
        except UNREACHED as error:
            raise LoadError(f"{target.host} does not answer: {error}.") from error
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise LoadError(
                f"{target.host} does not answer /info and /tokenize as TGI does: {error}."
            ) from error
        finally:
            client.close()


def _per_token(client: Client, text: str) -> float:
    return len(text) / len(client.ask("/tokenize", {"inputs": text}))
