"""What a role sets in the environment of TGI's launcher.  Pure.

All of it are defaults: what the user has set, in the environment or on the command line, wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tgi_patches.contract import Role, ShardSpec
from tgi_patches.entrypoint.flags import value_of

TGI_DTYPES = ("float16", "bfloat16")
"""That the launcher's flag knows; float32 is what TGI takes by itself where there is no accelerator."""
BATCH_LIMIT = 128
"""The launcher's own default of concurrent requests."""
DECODE_BUDGET_TOKENS = (512, 1024)
"""A hit costs one token, a miss is computed in chunks of so many; warmup leaves memory to the KV cache."""
GRAPH_STEP = 32
"""A step is padded to the next graph: powers of two up to here, then by this many rows."""


def spec_defaults(spec: ShardSpec, arguments: Sequence[str], user: Mapping[str, str]) -> dict[str, str]:
    """What the spec orders, and the profile of its role.

    ATTENTION is not there: the launcher takes flashinfer, and another one where a model's heads need it.
    """
    values = {
        "MODEL_ID": spec.model,
        "REVISION": spec.revision,
        "DTYPE": spec.dtype if spec.dtype in TGI_DTYPES and not _quantized(arguments, user) else "",
        "NUM_SHARD": str(spec.tensor_parallel),
        "MAX_INPUT_TOKENS": "" if _legacy_limit(arguments, user) else str(spec.max_input_tokens),
        "MAX_TOTAL_TOKENS": str(spec.max_total_tokens),
        "MAX_CONCURRENT_REQUESTS": str(spec.max_concurrent_requests),
        "MAX_BATCH_TOTAL_TOKENS": str(spec.kv_pool_tokens or ""),
    }
    told = {name: value for name, value in values.items() if value}
    return told | role_defaults(spec.role, spec, arguments, user)


def role_defaults(
    role: Role, spec: ShardSpec | None, arguments: Sequence[str], user: Mapping[str, str]
) -> dict[str, str]:
    """What distinguishes a role; without a spec, no more than can be known without one."""
    match role:
        case Role.PREFILL:
            return _prefill(spec)
        case Role.DECODE:
            return _decode(spec, arguments, user)
        case Role.MIXED:
            return _prefix_caching(spec) | _budget(spec)


def graph_sizes(limit: int) -> list[int]:
    """Batch sizes to capture, up to and with `limit`."""
    powers = [1 << power for power in range(GRAPH_STEP.bit_length()) if 1 << power < limit]
    return [*powers, *range(2 * GRAPH_STEP, limit, GRAPH_STEP), limit]


def _prefill(spec: ShardSpec | None) -> dict[str, str]:
    return {
        "CUDA_GRAPHS": "0",
        # Torch starts with TF32 for float32 matrices, as TGI switches it on once its models are imported.
        # (NVIDIA_TF32_OVERRIDE is cuBLAS' own switch and overrules both: it stays the user's.)
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        **_prefix_caching(spec),
        **_budget(spec),
    }


def _decode(spec: ShardSpec | None, arguments: Sequence[str], user: Mapping[str, str]) -> dict[str, str]:
    limit = BATCH_LIMIT if spec is None else spec.max_concurrent_requests
    return {
        # Copies of KV into the cache get hardware queues beside the compute stream's.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_GRAPHS": ",".join(map(str, graph_sizes(limit))),
        # Room for requests that wait, so that the gateway's own limit is the one that counts.
        "MAX_CONCURRENT_REQUESTS": str(limit + max(4, limit // 4)),
        # The trie keeps prompts whose prefill failed, and would hold KV that is imported anyway.
        "PREFIX_CACHING": "0",
        **_decode_budget(spec, arguments, user),
    }


def _prefix_caching(spec: ShardSpec | None) -> dict[str, str]:
    """Off; where it is asked for, the launcher still decides, because not every model can have it."""
    return {} if spec is not None and spec.prefix_caching else {"PREFIX_CACHING": "0"}


def _budget(spec: ShardSpec | None) -> dict[str, str]:
    return {} if spec is None else {"MAX_BATCH_PREFILL_TOKENS": str(spec.max_batch_prefill_tokens)}


def _decode_budget(
    spec: ShardSpec | None, arguments: Sequence[str], user: Mapping[str, str]
) -> dict[str, str]:
    """Low; but where TGI cannot cut a prompt into chunks, a miss must fit as a whole."""
    if _unchunked(arguments, user):
        whole = 0 if spec is None else max(spec.max_batch_prefill_tokens, spec.max_input_tokens)
        return {"MAX_BATCH_PREFILL_TOKENS": str(whole)} if whole else {}
    low, high = DECODE_BUDGET_TOKENS
    asked = high if spec is None else spec.max_batch_prefill_tokens
    return {"MAX_BATCH_PREFILL_TOKENS": str(min(max(asked, low), high))}


def _unchunked(arguments: Sequence[str], user: Mapping[str, str]) -> bool:
    speculate = value_of(arguments, "--speculate") or user.get("SPECULATE") or "0"
    return speculate != "0" or user.get("PREFILL_CHUNKING", "1").lower() not in ("1", "true")


def _quantized(arguments: Sequence[str], user: Mapping[str, str]) -> bool:
    """TGI refuses a dtype beside most quantizations, and takes the right one by itself."""
    return bool(user.get("QUANTIZE")) or value_of(arguments, "--quantize") is not None


def _legacy_limit(arguments: Sequence[str], user: Mapping[str, str]) -> bool:
    """The launcher refuses to have both names of one limit."""
    return "MAX_INPUT_LENGTH" in user or value_of(arguments, "--max-input-length") is not None
