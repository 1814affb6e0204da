"""KV between a GPU's cache and an arena in host memory: pinned, asynchronous, beside the compute stream.

Not yet run on a GPU: what has run is the same code over `streams.StepStreams`, on a CPU.
"""
