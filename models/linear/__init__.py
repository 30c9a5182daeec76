"""Linear layers: how their weights are held (`layers`, `packed`), the ways to compute them (`kernels`), and which way
is fastest on this machine (`choice`).

The folder imports `checkpoints`, `machine` and `memory`. Every way reads the one copy of the weights that there is."""
