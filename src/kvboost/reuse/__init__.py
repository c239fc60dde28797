"""The seven stages between a prompt and its logits; their names sort in the order data moves.

    tokens ─► chunks ─► keys ─► lookup ─► place ─► repair ─► run ─► store
              split     derive   find     assemble  select    forward commit

No stage imports another: they share the value types of `kvboost.core` and meet in
`kvboost.engine.prefill`.
"""
