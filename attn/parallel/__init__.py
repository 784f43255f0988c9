"""Context parallelism: sequences whose rows several devices share. docs/sharding.md

shards.py says which rows a device holds and which launches compute them, sequence.py deals rows out, context.py computes attention of them and
context_gradient.py its gradient.
"""
