"""Linear layers: how their weights are held (`layers`), the ways to compute them (`kernels`), and which way is fastest
on this machine (`choice`).

The folder imports `checkpoints` and `machine`. Every way reads the one copy of the weights that there is."""
