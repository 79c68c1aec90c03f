"""Low-bit matmuls: int8 and fp8 weights, quantised, rotated, multiplied and dequantised."""
