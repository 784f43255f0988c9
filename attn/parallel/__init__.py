"""Context parallelism: attention over sequences whose rows several devices share. See docs/sharding.md.

shards.py says which rows a device holds, and which kernel launches compute them. sequence.py divides a sequence over devices and joins it again.
context.py computes attention, context_gradient.py its gradient."""
