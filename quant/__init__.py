"""GPTQ files, packing, the int4 linear and GPTQ for one matrix. A leaf package: imports nothing of ours above it."""
