"""``optimizer.step()``: captured, queued, tried early, run on the host or on the device.

Read `hoststep` (what is put in its place), `capture` (what is done later), `jobs` (by whom), `devicehomes` and
`devicesteps` (parameters stepped on the device), `speculation` (begun before it is called), `statewatch` (who looks at
the optimizer's states).
"""
