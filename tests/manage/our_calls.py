"""Counts the calls of hetero's own Python functions, whoever makes them: hooks, patches, dispatch.

The virtual device's own module is left out: it stands for ``torch.cuda``.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hetero
from hetero.devices import virtual

_HERE = str(Path(hetero.__file__).parent) + "/"
_DEVICE = str(Path(virtual.__file__).parent) + "/"


def our_calls(run: Callable[[], Any]) -> Counter[str]:
    """By ``module.function``, while ``run`` runs. Backward runs on this thread, where it can be seen."""
    seen: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_HERE) and not file.startswith(_DEVICE):
            seen[f"{Path(file).stem}.{frame.f_code.co_qualname}"] += 1

    with torch.autograd.set_multithreading_enabled(False):
        gc.disable()  # a manager of before that it would take away just now has finalizers, which are ours as well
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
            gc.enable()
    return seen
