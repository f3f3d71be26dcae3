"""Where torch's operators, functions and calls meet managed parameters.

Read `parameter` (the class), `operators` (on the device), `athome` (at home), `functions` (what is no operator:
metadata, ``p.grad``, ``p.data``), `compiled`, `parts` and `outside` (calls of submodules, and beside the model),
`clipping` and `scaling` (lists of gradients).
"""
