"""Self-distillation: the frozen target teaches its own exit heads.

Text is written by the target (or read from a file), hidden states are cached once, and each head starts from a
closed form and trains on the cache. `run.train_heads` is the whole of it; the other modules are its stages.
"""
