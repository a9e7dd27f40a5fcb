"""Lets threads that move bytes give way to those that serve.

Owns the priority of the loading threads. Refuses to fail where a system does not allow it.
"""

import logging
import os
import threading

logger = logging.getLogger(__name__)

LOADING_NICENESS = 5
"""Against a thread of niceness 0, one of 5 gets about a quarter of a core that both want.

Source: sched(7), weights of nice values: a factor of 1.25 for each.
"""


def yield_to_serving() -> None:
    """Lower this thread's priority; Linux keeps one for each thread. For good: never raised."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOADING_NICENESS)
    except OSError as error:
        logger.info("loading threads keep their priority: %s", error)
