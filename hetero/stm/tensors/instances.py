"""Objects of a class, wherever they are.

Owns the search. There may be a million objects, of which a hundred are sought: only these come to Python. Taking all of
them (``gc.get_objects``) would do harm: among them are tuples that another thread is still making, as in
``tuple(x for x in ...)``, and CPython cannot finish one that somebody refers to meanwhile (a SystemError on that
thread).
"""

import gc
from typing import TypeVar

__all__ = ["instances_of"]

_Kind = TypeVar("_Kind")


def instances_of(kind: type[_Kind]) -> list[_Kind]:
    """All that the garbage collector knows of, instances of subclasses too."""
    # By their ids: a class has no hash if its metaclass says so.
    kinds, newest = {id(kind): kind}, [kind]
    while newest:
        newest = [found for each in newest for found in type.__subclasses__(each) if id(found) not in kinds]
        kinds.update((id(found), found) for found in newest)
    # An instance refers to its class, as do a few other objects.
    return [found for found in gc.get_referrers(*kinds.values()) if id(type(found)) in kinds]
