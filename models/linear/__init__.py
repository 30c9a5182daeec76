"""Linear layers that torch computes: holders of their weights (`layers`), modules with weights in int8 (`modules`), and
layers that other libraries quantized (`stored`).

The folder imports `checkpoints` and `native`. Weights are held once: each layer reads the only copy."""
