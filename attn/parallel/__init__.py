"""Context parallelism: attention over sequences whose rows are divided among devices. See docs/sharding.md.

shards.py computes the rows that a device holds and the launches that compute them. sequence.py shards and unshards a sequence. context.py computes
attention, context_gradient.py its gradient.
"""
