"""Linear layers that torch computes: how their weights are held (`layers`), those in int8 as modules (`modules`), and
those that other libraries quantized (`stored`).

The folder imports `checkpoints` and `native`. Each layer reads the one copy of its weights that there is."""
