"""Many machines: replicas of an engine on Ray Serve, that know where the audio has been (the extra ``cluster``).

Imports Ray inside of functions and of the modules that only a cluster imports: without it, `Cluster` says what to
install. May use ``core``, ``actors``, ``api`` and Ray.
"""
