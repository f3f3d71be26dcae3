"""One managed tensor: what it may be, where its bytes are, who else holds them.

Read `state` (states, and the only count of bytes), `managed` (home and device copy of one parameter), `fetch` (how
autograd reaches it), `homes` (the way to the host and back); `exposure`, `hostcopies`, `glances` and `onlookers` say
who would notice that its bytes move.
"""
