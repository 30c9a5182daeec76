"""Linear layers in int8 as modules that torch computes (`modules`), and layers that other libraries quantized
(`stored`). Weights are held once: each layer reads the only copy."""
