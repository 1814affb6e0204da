"""Tensor parallelism on the CPU: the processes that share one model, each with its part of weights and KV.

Rank 0 is the shard's own process.  It sends every verb of the seam to the followers before it runs it
itself, so that all ranks take the same steps in the same order:

    server, loop -> model.RankedModel -> channel -> follower (a process per rank)
                          |                             |
                  TransformersModel  <- group (sums) -> TransformersModel
"""
