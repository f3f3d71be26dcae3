"""Device copies that somebody else holds: they follow home.

Owns how such a copy is brought up to date in its place. Invariant: once home has been written, no copy that is given up
is held by anybody: who holds one sees in it what home holds.

[Note: copies that follow]
Unmanaged, a view of a weight that a model takes within its forward and keeps (``self.c = self.k.weight.detach().t()``)
shares the parameter's storage: it sees every step, and what is written to it is written to the parameter. Managed, it
shares the storage of a device copy. So a copy whose storage somebody besides us holds (`ManagedTensor.is_held`) stays:
when home has been written, its storage is written as well, at once; what was written to it goes home before anybody
reads or writes home. Its parameter is stepped at once (on the device, in place, if it lives there), since nothing tells
when such a view is read. The bytes count as the parameter's for as long as they are held, and cannot be evicted.

Home can be written without our learning of it at once, through ``p.data`` or a tensor that was assigned to it. A held
copy then follows at the next forward, or the next operator on the parameter.
"""

from typing import NoReturn

import torch

from hetero.devices import CopyEngine
from hetero.errors import ManageError
from hetero.stm.copies.uploads import Uploads
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["refresh", "refuse_written_twice"]


def refresh(tensor: ManagedTensor, engine: CopyEngine, uploads: Uploads) -> None:
    """Write what home holds to the copy, which is held and older. Home, and its twin in low precision, are settled.

    Raises `ManageError` if both have been written since."""
    data = tensor.data
    assert data is not None
    if tensor.is_dirty:
        refuse_written_twice(tensor)
    if tensor.ready is not None:
        engine.compute_after_upload(tensor.ready)
        tensor.ready = None
    version = tensor.version_of_copy()
    event = engine.upload(tensor.origin, data)
    uploads.note(event, tensor)
    engine.compute_after_upload(event)  # nothing tells when it is read
    # As many writes as autograd would have seen: who has saved it learns of them.
    torch._C._autograd._unsafe_set_version_counter((data,), (version,))
    tensor.note_loaded()


def refuse_written_twice(tensor: ManagedTensor) -> NoReturn:
    """Raises `ManageError` for a copy and a home that were both written: nobody knows in which order. Home counts from
    then on."""
    assert tensor.data is not None
    tensor.clean_version = tensor.data._version
    raise ManageError(
        f"{tensor.name} {tuple(tensor.home.shape)} was written through a view from within the model's forward, "
        "which is still held, and also through p.data, and which came first cannot be told: the parameter is now what "
        "p.data made of it. Write through one of them, or look at the parameter in between (p.detach())"
    )
