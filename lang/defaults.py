"""The backend that programs use when none is named: what ``set_default_backend`` was given, or the embedded model in this process."""

from __future__ import annotations

import threading
from typing import Any

from lang.backends.base import Backend
from lang.errors import BackendError
from radixrt.errors import shown


class _Default:
    """Holds the one default backend of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._backend: Backend | None = None

    def get(self) -> Backend:
        with self._lock:
            if self._backend is None:
                from lang.backends.runtime import Runtime

                self._backend = Runtime()
            return self._backend

    def set(self, backend: Backend | None) -> None:
        with self._lock:
            self._backend = backend


_DEFAULT = _Default()


def default_backend() -> Backend:
    """The default backend; the embedded model is taken where none was set (and loaded when its first program starts)."""
    return _DEFAULT.get()


def set_default_backend(backend: Backend | None) -> None:
    """Use ``backend`` for programs that name none. ``None``: the embedded model.

    Raises:
        BackendError: it is no backend.
    """
    if backend is not None and not isinstance(backend, Backend):
        raise BackendError(
            f"{shown(backend)}: is no backend (Runtime(), RuntimeEndpoint(url), OpenAI(...), MockBackend(...))"
        )
    _DEFAULT.set(backend)


def flush_cache(backend: Any = None) -> Any:
    """Let the backend forget the KV that nothing running holds."""
    target: Any = backend if backend is not None else default_backend()
    if not hasattr(target, "flush_cache"):
        raise BackendError(f"{target.name}: has no cache to flush")
    return target.flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """The backend's figures."""
    from lang.loop import LOOP

    target: Any = backend if backend is not None else default_backend()
    return LOOP.call(target.stats)
