"""Many machines: an engine of replicas on Ray Serve, whose router knows which replica has encoded what.

`Cluster` is the engine. `RayBackend` sends its requests to replicas, and sends them again if a replica is lost
(`flights` decides). `ContentRouter` chooses the replica (`routing` decides). `Replica` runs the actors.
`Deployment` starts and ends the replicas. `serve` has the options of ``triolet serve --cluster``. Nothing of Ray is
imported before a cluster is entered. May use the rooms ``core``, ``actors`` and ``api`` of triolet.
"""

from .cluster import Cluster
from .register import Departure

__all__ = ["Cluster", "Departure"]
