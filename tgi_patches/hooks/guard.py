"""Is this the TGI that the overlay was written for?  Compares the source of what it relies on.

TGI's version string says nothing (v3.3.7 calls itself 3.3.6-dev0), so every function that is wrapped,
or whose behaviour the overlay builds on, is known by a hash of its source.
`python -m tgi_patches.hooks.guard` compares the TGI that this interpreter imports, function by function.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Mapping
from functools import reduce
from types import MappingProxyType

Known = Mapping[str, tuple[str, ...]]
"""`module:qualified name` -> hashes of sources that are known to work."""

_FLASH = "text_generation_server.models.flash_causal_lm"
_CAUSAL = "text_generation_server.models.causal_lm"
_TOKENS = "text_generation_server.utils.tokens"
_SERVER = "text_generation_server.server:TextGenerationService"
_MODEL = "text_generation_server.models.model:Model"
_CACHE = "text_generation_server.layers.attention.kv_cache:KVCache"

TGI_VERSION = "v3.3.7"
TGI_COMMIT = "dfb3fbe78e0d1d69251bd33065591c61bafdfaa8"
"""Whose sources the hashes below are of."""

SERVER: Known = MappingProxyType(
    {
        f"{_SERVER}.__init__": ("07ab121c6c800039",),
        f"{_SERVER}.Warmup": ("a974a4dcccc0f4f2",),
        f"{_SERVER}.Prefill": ("3484ee8737bf4960",),
        f"{_SERVER}.Decode": ("f3b6bf783c5a8b8d",),
        f"{_SERVER}.FilterBatch": ("314ea833887fddbd",),
        f"{_TOKENS}:StoppingCriteria.__call__": ("f0c795d1208f453e",),
        f"{_TOKENS}:batch_top_tokens": ("bcd85d451f2a69f9",),
        f"{_MODEL}.decode_token": ("999b4eb752398ed2",),
    }
)
FLASH: Known = MappingProxyType(
    {
        f"{_FLASH}:FlashCausalLMBatch.from_tokenized": ("5f3414f6e7bef0be",),
        f"{_FLASH}:FlashCausalLMBatch.prepare_for_prefill": ("48cdf413257197fd",),
        f"{_FLASH}:FlashCausalLMBatch.filter": ("6cc0be947576909a",),
        f"{_FLASH}:FlashCausalLMBatch.concatenate": ("4a2a0588303be23a",),
        f"{_FLASH}:FlashCausalLM.generate_token": ("ccb00f6d63cb4c4f",),
        f"{_FLASH}:FlashCausalLM.warmup": ("c2b31efb13ac3f6e",),
        f"{_FLASH}:FlashCausalLM.init_kv_cache": ("99eec88745e8268f",),
        f"{_TOKENS}:HeterogeneousNextTokenChooser.__call__": ("63f6b25844034780",),
        f"{_TOKENS}:HeterogeneousSampling.__init__": ("496dde110c0189e9",),
        f"{_TOKENS}:HeterogeneousSampling.__call__": ("75c670adee08e18d",),
        f"{_TOKENS}:Sampling.__init__": ("f5a18705ce32a209",),
        f"{_CACHE}.__init__": ("613b6510f61fe4dc",),
        f"{_CACHE}.store": ("cd9c5e5a6b643cfb",),
    }
)
CAUSAL: Known = MappingProxyType(
    {
        f"{_CAUSAL}:CausalLMBatch.from_pb": ("3074d94eb3e3098d",),
        f"{_CAUSAL}:CausalLMBatch.filter": ("bff74ca9553ea9fd",),
        f"{_CAUSAL}:CausalLMBatch.concatenate": ("3b12f65ef4e337ee",),
        f"{_CAUSAL}:CausalLM.forward": ("04d31d7fee36e2cf",),
        f"{_CAUSAL}:CausalLM.generate_token": ("c04c5241ffa7e0ff",),
        f"{_TOKENS}:NextTokenChooser.__call__": ("452e8b82e0c15c44",),
    }
)


def source_hash(function: object) -> str:
    """16 hex digits over a function's source, decorators included."""
    plain = inspect.unwrap(function)  # type: ignore[arg-type]
    return hashlib.sha256(inspect.getsource(plain).strip().encode()).hexdigest()[:16]


def differences(known: Known) -> list[str]:
    """The names among `known` whose source is another one, or is not there."""
    return [name for name, hashes in known.items() if _found(name) not in hashes]


def sentence(names: list[str]) -> str:
    """Why a server is not hooked."""
    shown = ", ".join(name.partition(":")[2] for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"This TGI is not one that the overlay was tested with: {shown}{more} differ from {TGI_VERSION}."


def _found(name: str) -> str | None:
    module, _, path = name.partition(":")
    try:
        return source_hash(reduce(getattr, path.split("."), importlib.import_module(module)))
    except (ImportError, AttributeError, OSError, TypeError):
        return None


def main() -> int:
    """Print every name with the hash found and whether it is a known one; exit code 1 where any is not."""
    unknown = differences(SERVER) + differences(FLASH) + differences(CAUSAL)
    for name in (*SERVER, *FLASH, *CAUSAL):
        verdict = "unknown" if name in unknown else "known"
        sys.stdout.write(f"{verdict:8}{_found(name) or 'absent':18}{name}\n")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
