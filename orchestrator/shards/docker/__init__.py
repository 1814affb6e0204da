"""Shards as containers of one Docker engine.  `launcher` is the seam, `engine` the only way to the SDK."""
