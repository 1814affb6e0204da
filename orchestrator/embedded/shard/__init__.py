"""The CPU shard: a stand-in for one TGI container on a machine without GPUs.

server (TGI's HTTP surface) -> loop (TGI v3's router loop) -> seam -> model (transformers, paged KV).
"""
