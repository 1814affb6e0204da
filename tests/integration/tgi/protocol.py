"""The messages of a fake TGI server: the fields that we use, described here and numbered in this order.

TGI's own description comes from the package that it installs, so ours needs to agree with it in names only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "generate.v3"
SERVICE = "TextGenerationService"
METHODS = ("Info", "ClearCache", "FilterBatch", "Warmup", "Prefill", "Decode")

ENUMS = {
    "FinishReason": ("FINISH_REASON_LENGTH", "FINISH_REASON_EOS_TOKEN", "FINISH_REASON_STOP_SEQUENCE"),
    "GrammarType": ("GRAMMAR_TYPE_NONE", "GRAMMAR_TYPE_JSON", "GRAMMAR_TYPE_REGEX"),
}
MESSAGES = {
    "InfoRequest": "",
    "InfoResponse": (
        "requires_padding:bool dtype:string device_type:string speculate:uint32 support_chunking:bool "
        "use_prefix_caching:bool attention_impl:string block_size:uint32"
    ),
    "ClearCacheRequest": "id:uint64",
    "ClearCacheResponse": "",
    "InputChunk": "text:string",
    "Input": "chunks:InputChunk*",
    "NextTokenChooserParameters": (
        "temperature:float top_k:uint32 top_p:float typical_p:float do_sample:bool seed:uint64 "
        "repetition_penalty:float frequency_penalty:float watermark:bool grammar:string "
        "grammar_type:GrammarType"
    ),
    "StoppingCriteriaParameters": "max_new_tokens:uint32 stop_sequences:string* ignore_eos_token:bool",
    "Request": (
        "id:uint64 inputs:string input_chunks:Input truncate:uint32 parameters:NextTokenChooserParameters "
        "stopping_parameters:StoppingCriteriaParameters prefill_logprobs:bool top_n_tokens:uint32 "
        "blocks:uint32* slots:uint32* adapter_id:string cache_len:uint32 add_special_tokens:bool "
        "chunk_len:uint32"
    ),
    "Batch": "id:uint64 requests:Request* size:uint32 max_tokens:uint32 max_blocks:uint32",
    "CachedBatch": "id:uint64 request_ids:uint64* size:uint32 max_tokens:uint32 current_tokens:uint32",
    "GeneratedText": "text:string generated_tokens:uint32 finish_reason:FinishReason seed:uint64",
    "Tokens": "ids:uint32* logprobs:float* texts:string* is_special:bool*",
    "Generation": (
        "request_id:uint64 prefill_tokens:Tokens tokens:Tokens generated_text:GeneratedText "
        "top_tokens:Tokens*"
    ),
    "FilterBatchRequest": "batch_id:uint64 request_ids:uint64*",
    "FilterBatchResponse": "batch:CachedBatch",
    "PrefillRequest": "batch:Batch cached_batch:CachedBatch",
    "PrefillResponse": "generations:Generation* batch:CachedBatch",
    "DecodeRequest": "batches:CachedBatch*",
    "DecodeResponse": "generations:Generation* batch:CachedBatch",
    "WarmupRequest": "batch:Batch max_input_tokens:uint32 max_prefill_tokens:uint32 max_total_tokens:uint32",
    "WarmupResponse": "max_supported_total_tokens:uint32 max_input_tokens:uint32 max_total_tokens:uint32",
}
_SCALARS = {
    "bool": Field.TYPE_BOOL,
    "float": Field.TYPE_FLOAT,
    "string": Field.TYPE_STRING,
    "uint32": Field.TYPE_UINT32,
    "uint64": Field.TYPE_UINT64,
}


@cache
def schema() -> bytes:
    """A serialized FileDescriptorProto."""
    file = FileDescriptorProto(name="fake.proto", package=PACKAGE, syntax="proto2")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields.split(), start=1):
            _describe(message.field.add(number=number), text)
    service = file.service.add(name=SERVICE)
    for method in METHODS:
        service.method.add(
            name=method, input_type=f".{PACKAGE}.{method}Request", output_type=f".{PACKAGE}.{method}Response"
        )
    return bytes(file.SerializeToString())


def _describe(field: Any, text: str) -> None:
    """`name:type`, with a star for a list."""
    field.name, _, kind = text.partition(":")
    field.label = Field.LABEL_REPEATED if kind.endswith("*") else Field.LABEL_OPTIONAL
    kind = kind.rstrip("*")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = Field.TYPE_ENUM if kind in ENUMS else Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


@cache
def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    pool.AddSerializedFile(schema())
    return pool


@cache
def message(name: str) -> Any:
    """The class of a message."""
    return GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))
