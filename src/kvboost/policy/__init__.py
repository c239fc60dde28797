"""The cost model and the guardrail: decisions learned from past requests. No tensors."""
