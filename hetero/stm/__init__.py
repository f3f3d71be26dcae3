"""StatefulTensorMgr: states, bytes, residency of managed tensors, and the interception of operators.

From top to bottom, each of which imports only what stands below it: `patches`, `modelcalls`, `conversions`,
`checkpoints`, `wrappers` (where the user's calls come in); `settled` (everything fits: interception is off); `step`
(the optimizer's); `manager` (the hub); `interception` (of operators); `running` (following a plan); `homeaccess` (what
is done with homes meanwhile); `gradients`, `activations`, `plans`; `updates` (of one parameter); `copies` (which are
on the device); `tensors` (one managed tensor); `deferred` (the queue of updates), `forks`, `neighbours`; `living`.
"""

from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.tensors.homes import Homes
from hetero.stm.tensors.state import Kind, Ledger, State, StatefulTensor, Tier

__all__ = ["Homes", "Kind", "Ledger", "State", "StatefulTensor", "StatefulTensorMgr", "Tier"]
