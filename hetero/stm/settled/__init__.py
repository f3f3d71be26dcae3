"""The settled state: everything fits, so parameters are ordinary ones on the device and nothing is intercepted.

Invariant: while settled, model and optimizer are what ``model.to(device)`` would have made of them, so every number is
the unmanaged run's. What stays is one check at each forward of the model.

Read `state` (when it begins and ends), `kin` (who settles together), `transition` (the way there and back), `check`
(what a forward finds), `attempts` (when one may settle), `fitting` (whether everything fits), `parameters` (what
becomes of them), `exchange` (their two implementations), `who` (which parameters are settled), `added` (those that a
model gets later).
"""
