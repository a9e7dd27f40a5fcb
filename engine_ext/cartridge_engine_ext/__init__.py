"""What a vLLM engine loads to serve Cartridges; importing it imports neither vllm nor torch."""
