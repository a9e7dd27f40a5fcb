"""Named steps at which a test may kill this process, or make its disk fail.

Owns the meaning of the environment variable `CARTRIDGE_FAILPOINT`. Refuses to do anything when it
is not set: it is for tests of recovery, never for production.
"""

import errno
import os
import signal

from cartridge_proto.names import ENV_FAILPOINT


def failpoint(step: str) -> None:
    """Mark a step; does nothing unless `CARTRIDGE_FAILPOINT` names it.

    The variable holds steps, separated by commas. `after_rename` kills this process with SIGKILL,
    so that nothing is cleaned up; `after_rename:error` lets the step fail.

    Raises:
        OSError: EIO, for `step:error`.
    """
    wanted = os.environ.get(ENV_FAILPOINT)
    if not wanted:
        return
    steps = wanted.split(",")
    if f"{step}:error" in steps:
        raise OSError(errno.EIO, os.strerror(errno.EIO), f"failpoint {step}")
    if step in steps:
        os.kill(os.getpid(), signal.SIGKILL)
