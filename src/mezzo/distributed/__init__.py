"""Models over several ranks: sharding them under a policy.

What the ranks of a step agree on lies below (``step/consensus.py``), and so does what a session does with shards.
"""

from mezzo.distributed.sharding import fully_shard

__all__ = ["fully_shard"]
