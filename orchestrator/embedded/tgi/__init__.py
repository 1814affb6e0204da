"""Drives TGI's own Python server, as TGI's router does, behind the embedded shard's HTTP surface."""
