"""Facts about ops, which rules, prices, passes and capture read: operands and names, FLOPs and bytes, the op of a mixture of experts."""
