"""KV from one shard's device to another's without a stop in host memory: opt-in, and never in the way.

A link carries records one way between two ranks.  `state` decides, `link` drives a Communicator (`gloo` for
CPUs, `nccl` for GPUs), `exchange` says what travels and checks it, `rendezvous` brings both ends together.
`nccl` has not yet run on a GPU.  TGI's process groups are never touched.
"""
