"""Many machines: an engine of replicas on Ray Serve that know where the audio has been. Needs the extra ``cluster``.

`Cluster` is the engine. `RayBackend` sends its requests to replicas and again where one is lost (`core.flights`
decides), `ContentRouter` chooses the replica (`core.routing` decides), `Replica` runs the actors there, `Deployment`
starts and ends all of it. Nothing of Ray is imported before a cluster is entered. May use ``core``, ``actors`` and
``api``.
"""

from .cluster import Cluster
from .register import Departure

__all__ = ["Cluster", "Departure"]
