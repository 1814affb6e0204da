"""`verify`: the separated pair must answer exactly as one shard does."""
