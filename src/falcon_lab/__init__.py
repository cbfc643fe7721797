"""falcon-lab: train speculative-decoding drafters and measure them honestly.

Importing the package is cheap: torch, lightning and transformers are imported where they are used,
so that a mistyped option costs a fraction of a second.
"""

from falcon_lab.plugins.hooks import hookimpl

__version__ = "0.1.0"
__all__ = ["__version__", "hookimpl"]
