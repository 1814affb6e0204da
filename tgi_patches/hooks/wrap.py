"""Putting a function around one of TGI's, method or classmethod."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Around = Callable[..., Any]
"""Called with the original and then with its arguments."""


def wrap(owner: Any, name: str, around: Around) -> None:
    """Replace `owner.name`, of a class or a module, by one that calls `around(original, ...)`."""
    found = vars(owner)[name]
    is_class_method = isinstance(found, classmethod)
    original = found.__func__ if is_class_method else found

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, classmethod(wrapped) if is_class_method else wrapped)


def wrap_coroutine(owner: Any, name: str, around: Around) -> None:
    """The same for an `async def`."""
    original = vars(owner)[name]

    @wraps(original)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        return await around(original, *args, **kwargs)

    setattr(owner, name, wrapped)
