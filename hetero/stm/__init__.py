"""StatefulTensorMgr: states, bytes, residency of managed tensors, and the interception of operators.

Start at `manager`, the hub. Which module may import which is the contract in ``pyproject.toml``; what each of them does
is a line in docs/design.md (Floors).
"""

from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.tensors.homes import Homes
from hetero.stm.tensors.state import Kind, Ledger, State, StatefulTensor, Tier

__all__ = ["Homes", "Kind", "Ledger", "State", "StatefulTensor", "StatefulTensorMgr", "Tier"]
