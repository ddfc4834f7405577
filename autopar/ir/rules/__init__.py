"""Factor rules of ops: one per family, proved by running them shard by shard."""
