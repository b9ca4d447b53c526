"""Facts about ops for rules, cost model, passes and capture: operands and names, FLOPs and bytes, the op of a mixture of experts."""
