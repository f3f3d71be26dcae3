"""Gradients on their way home, what is done to them there, and what the user sees of them.

Read `offload` (the way), `changes` and `additions` (what is still to be done), `kept` (those that stay on the device),
`access` (``p.grad``).
"""
