"""The simulated backend: the real protocol over sandboxes that exist only in memory.

For tests of everything above the backend, under any clock, and for trying the platform out where
the host can hold no real sandbox. It knows the seam (`backends/interface.py`), the record, and the
frames; nothing of the kernel. Start at `backend.py`, then `aether.py`; `faults.py` is what a test
turns. What can be executed is in `vocabulary.py` and `probe.py`.
"""

from dsec.edge.sim.backend import SimBackend, SimHost
from dsec.edge.sim.faults import LAUNCH_STEPS, Faults

__all__ = ["LAUNCH_STEPS", "Faults", "SimBackend", "SimHost"]
