"""What training a model would take on a machine that one does not have: memory, traffic and time of a step.

`forecast` plans a traced step (`hetero.trace`, on fake tensors) as `hetero.manage` would plan a measured one, on a
modelled machine. It knows no torch, and measures nothing.
"""

from hetero.forecast.machines import MACHINES, KnownMachine
from hetero.forecast.planned import Forecast, Host, forecast

__all__ = ["MACHINES", "Forecast", "Host", "KnownMachine", "forecast"]
