"""Following a plan: where an iteration is in it, and what is done when memory is short all the same."""
