"""Which of TGI's models can be hooked.  Pure; `refusal` answers in a sentence for the user."""

from __future__ import annotations

from dataclasses import dataclass

FLASH_CLASSES = frozenset({"FlashCausalLM", "TransformersFlashCausalLM"})
CAUSAL_CLASSES = frozenset({"CausalLM"})
_CAUSAL_BATCH = "CausalLMBatch"
_HEADS_FIRST = frozenset({("flashdecoding-ipex", "cpu")})
_TOKENS_FIRST = frozenset(
    {
        ("flashinfer", "cuda"),
        ("flashdecoding", "cuda"),
        ("flashdecoding-ipex", "xpu"),
    }
)


@dataclass(frozen=True, slots=True)
class Served:
    """What decides: names of TGI's classes, its attention, torch's device type, tensor parallelism."""

    model_class: str
    batch_class: str
    attention: str
    device: str
    ranks: int = 1


def refusal(served: Served) -> str | None:
    """Why KV can be neither exported nor imported; None where it can."""
    if served.ranks > 1 and served.model_class in CAUSAL_CLASSES:
        return (
            f"KV of a {served.model_class} on {served.ranks} ranks cannot be relayed: TGI does not split it."
        )
    if served.model_class in CAUSAL_CLASSES:
        if served.batch_class == _CAUSAL_BATCH:
            return None
        return f"KV of the batch class {served.batch_class} cannot be relayed: its cache has another layout."
    if served.model_class not in FLASH_CLASSES:
        return (
            f"KV of the model class {served.model_class} cannot be relayed: only text decoders are supported."
        )
    if served.attention == "paged":
        return (
            "KV cannot be relayed under paged attention, whose prefill ignores a cached prefix: "
            "set ATTENTION to flashinfer or flashdecoding."
        )
    if (served.attention, served.device) not in _HEADS_FIRST | _TOKENS_FIRST:
        return f"KV cannot be relayed under the attention {served.attention} on {served.device}."
    return None


def heads_first(attention: str, device: str) -> bool:
    """True where the cache is `[blocks, heads, block, dim]` and not `[blocks, block, heads, dim]`."""
    return (attention, device) in _HEADS_FIRST
