"""Many machines: an engine of replicas on Ray Serve, whose router knows which replica has encoded what. Needs the extra
``cluster``.

`Cluster` is the engine. `RayBackend` sends its requests to replicas, and sends them again if a replica is lost
(`core.flights` decides). `ContentRouter` chooses the replica (`core.routing` decides). `Replica` runs the actors.
`Deployment` starts and ends the replicas. Nothing of Ray is imported before a cluster is entered. May use ``core``,
``actors`` and ``api``.
"""

from .cluster import Cluster
from .register import Departure

__all__ = ["Cluster", "Departure"]
