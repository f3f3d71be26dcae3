"""StatefulTensorMgr: states, bytes, residency of managed tensors, and the interception of operators.

Read bottom-up: `state` (what a tensor may be), `tensors` (one parameter), `residency` (device copies),
`gradients` (the way home), `planbook` (plans), `cycles` (which iteration it is), `executor` (following its plan),
`manager` (the hub); `intercept`, `saved` and `patches` are where torch enters; `homes` is where tensors live.
"""

from hetero.stm.homes import Homes
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.state import Kind, Ledger, State, StatefulTensor, Tier

__all__ = ["Homes", "Kind", "Ledger", "State", "StatefulTensor", "StatefulTensorMgr", "Tier"]
