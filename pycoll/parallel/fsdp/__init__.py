"""Fully sharded data parallelism: ZeRO-2, ZeRO-3 and hybrid sharding (docs/fsdp.md)."""
