"""Where torch's operators, functions and calls meet managed parameters.

Read `intercept` (operators), `functions` (what is none), `exchange` (how it is switched off for a parameter).
"""
