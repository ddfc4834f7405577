"""How ranks learn that another one failed: a key of the rendezvous store, which all watch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

_LOG = logging.getLogger(__name__)
_KEY = "autopar/failure"
_POLL_S = 0.5
_GRACE_S = 2.0


class FailureWatch:
    """Watches the store from a thread with its own connection.

    Args:
        store: Where failures are reported.
        holds_store: This process may hold the store.
        on_failure: Called once, from the thread, when another rank reports one: has to end what
            waits.
    """

    def __init__(
        self, store: dist.Store, on_failure: Callable[[], None], *, holds_store: bool
    ) -> None:
        self._holds_store = holds_store
        self._reporting = store
        self._watching: dist.Store = store.clone()  # type: ignore[attr-defined] # torch's stubs lack it
        self._on_failure = on_failure
        self._message: str | None = None
        self._reported = False
        self._found = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="autopar-failures")
        self._thread.start()

    @property
    def message(self) -> str | None:
        """What was reported so far."""
        return self._message

    @property
    def failed(self) -> bool:
        """True if this or another rank reported a failure."""
        return self._reported or self._message is not None

    def report(self, message: str) -> None:
        """Say that this rank failed; the first report of all ranks counts."""
        self._reported = True
        self.stop()
        try:
            self._reporting.compare_set(_KEY, "", message)
        except RuntimeError as error:  # the store died with its rank: nobody is left to tell
            _LOG.debug("no failure could be reported: %s", error)

    def linger(self) -> None:
        """Let the others read the report, if their store may live in this process."""
        if self._holds_store:
            time.sleep(_GRACE_S)

    def await_message(self) -> str | None:
        """A report, waited for as long as one may be on its way."""
        self._found.wait(_GRACE_S)
        return self._message

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_GRACE_S)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            try:
                if not self._watching.check([_KEY]):
                    continue
                message = self._watching.get(_KEY).decode()
            except RuntimeError:
                if self._stop.is_set():
                    return
                message = "the rendezvous store is gone: the rank that holds it ended"
            self._message = message
            self._found.set()
            self._on_failure()
            return
