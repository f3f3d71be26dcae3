"""What was measured of iterations, and the plans made of it.

Read `samples` and `timings` (measured), `plan` (one plan, made of them by `hetero.eviction`), `planbook` (the plan of
each kind of iteration), `homechoice` (what lives on the device), `cycles` (which iteration it is).
"""
