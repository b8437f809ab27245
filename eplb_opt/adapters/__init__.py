"""Placement under the names and signatures that engines call it by, one file per engine.

To use one, change the import: ``from eplb_opt.adapters.deepseek import rebalance_experts``. Torch
tensors or arrays in, the same kind out; torch is not needed otherwise.
"""
