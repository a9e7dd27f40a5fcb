"""Work on a few threads that keeps its order under each key.

Owns the lines of work and the threads. Refuses to let work overtake other work of its key.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

logger = logging.getLogger(__name__)


class OrderedWork:
    """Runs work of different keys side by side on `num_threads`, and of one key in order.

    All methods may be called from any thread and return at once. Keys with work take turns.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._lines: dict[Hashable, deque[Callable[[], object]]] = {}
        """Work that has not begun; a key is listed until the last of its work has ended."""
        self._is_stopped = False

    def submit(self, key: Hashable, work: Callable[[], object]) -> bool:
        """Run work after all that came under its key before; False when it is stopped."""
        with self._lock:
            if self._is_stopped:
                return False
            if key in self._lines:
                self._lines[key].append(work)
            else:
                self._lines[key] = deque([work])
                self._executor.submit(self._run_first, key)
            return True

    def is_idle(self, key: Hashable) -> bool:
        """Whether all work of a key has ended."""
        with self._lock:
            return key not in self._lines

    def stop(self) -> None:
        """Start nothing more."""
        with self._lock:
            self._is_stopped = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run_first(self, key: Hashable) -> None:
        with self._lock:
            work = self._lines[key].popleft()
        try:
            work()
        except Exception:
            logger.exception("work of %s", key)
        with self._lock:
            if not self._lines[key]:
                del self._lines[key]
            elif not self._is_stopped:
                self._executor.submit(self._run_first, key)
