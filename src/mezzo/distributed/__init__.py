"""Several ranks: what those that step together tell each other, and models that are sharded under a policy.

What a session does with shards, and what torch's ``fully_shard`` did to a model, is asked in ``mezzo.cast.model``.
"""

from mezzo.distributed.sharding import fully_shard

__all__ = ["fully_shard"]
