"""Other engines' operators, by their names and signatures, over nibble: swap an import to compare. See nibble.compat.vllm, .sglang, .deep_gemm."""
