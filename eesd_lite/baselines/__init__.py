"""Peer programs as contenders of `eesd bench`, each in a process of its own, perhaps with a Python of its own.

peer.py holds the parent's side, child.py the process's; accelerate.py and llama_cpp.py say how each peer is started.
A peer that is not installed is skipped with a message, never a reason to fail.
"""
