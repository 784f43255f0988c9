"""Context parallelism: attention over sequences whose rows are sharded over devices (docs/sharding.md). shards.py says which rows a device holds, and
which kernel launches compute them. sequence.py shards a sequence over devices and gathers it again. context.py computes attention,
context_gradient.py its gradient."""
