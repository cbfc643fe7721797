"""Drafters of falcon-lab beside a target that a server runs.

``host`` is the target as a drafter may use it, ``drafting`` what is drafted for the server's
requests, and ``vllm`` and ``sglang`` are the servers' sides. ``hidden_states`` has vLLM write what
a training reads in place of the target's passes (``extract``).
"""
