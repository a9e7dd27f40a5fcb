"""Sources that say which replicas there are, each a class whose `run` ends only when cancelled.

Owns reading them. Refuses to judge replicas, and to take any away because a source cannot be read:
then the last list stays, and the failure is counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cartridge_proto.residency import ReplicaId


@dataclass(frozen=True)
class Channel:
    """Where a source says what it found: `on_listed` gets its whole list, name -> base URL.

    `on_failed` is called whenever the source cannot be read, or not be believed.
    """

    on_listed: Callable[[Mapping[ReplicaId, str]], None]
    on_failed: Callable[[], None]
