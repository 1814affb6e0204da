"""What serving a request would take in either way, and which one is cheaper under the objectives.

The cost of a way is the seconds to the request's own last token and the seconds by which it holds up
others: a prompt computed on a shard that decodes stops every sequence there for its length.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.fleet import Room


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one way; seconds."""

    first_s: float
    """To the first token, as the client sees it."""
    finish_s: float
    """To the last token."""
    harm_s: float
    """That others lose, summed over them."""
    tpot_s: float
    """Mean time per token afterwards, of the slowest sequence on the shard that answers."""

    @property
    def cost_s(self) -> float:
        return self.finish_s + self.harm_s

    def violations(self, ttft_s: float | None, tpot_s: float | None) -> int:
        """How many of the objectives it misses."""
        missed = ttft_s is not None and self.first_s > ttft_s
        return missed + (tpot_s is not None and self.tpot_s > tpot_s)


def separated_s(
    prefill: Room,
    decode: Room,
    *,
    prompt_tokens: int,
    record_bytes: int,
    new_tokens: int,
    pull: bool,
    ahead_s: float = 0.0,
) -> Prediction:
    """On a pair with cost models: wait, prefill, relay, half a running step, then a step per token.

    The first step redoes the last prompt token, so an answer of n tokens takes n steps of the decode shard.
    That one is a forward of its own, for which those who decode there stand still.
    """
    assert prefill.costs.prefill is not None, "asked for where both are priced"
    assert decode.costs.decode is not None, "asked for where both are priced"
    first_s = ahead_s + prefill.queue_s + prefill.costs.prefill.alone_s(prompt_tokens)
    relay = decode.costs.pull if pull else decode.costs.relay
    relay_s = relay.seconds(record_bytes) if relay is not None else 0.0
    joins_s = decode.step_s / 2 if decode.slots else 0.0
    finish_s = first_s + relay_s + joins_s + new_tokens * decode.step_s
    harm_s = decode.costs.decode.step_s(1, prompt_tokens) * decode.slots
    return Prediction(first_s, finish_s, harm_s, decode.step_s)


def mixed_s(room: Room, *, prompt_tokens: int, new_tokens: int) -> Prediction:
    """On one shard with a cost model: the step that runs, the prefill, a step per further token."""
    assert room.costs.prefill is not None, "asked for where all are priced"
    prefill_s = room.costs.prefill.alone_s(prompt_tokens)
    joins_s = room.step_s / 2 if room.slots else 0.0
    first_s = joins_s + prefill_s
    finish_s = first_s + max(new_tokens - 1, 0) * room.step_s
    # Those who decode there stand still, and their mean time per token rises by it.
    tpot_s = room.step_s + (prefill_s / max(new_tokens, 1) if room.slots else 0.0)
    return Prediction(first_s, finish_s, prefill_s * room.slots, tpot_s)


def cheaper(one: Prediction, other: Prediction, ttft_s: float | None, tpot_s: float | None) -> bool:
    """True where `one` misses fewer objectives, or as many at a lower cost."""
    mine, theirs = one.violations(ttft_s, tpot_s), other.violations(ttft_s, tpot_s)
    return (mine, one.cost_s) < (theirs, other.cost_s)
