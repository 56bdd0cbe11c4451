"""Space × tasks × seeds → jobs → stored rows: planning, executing and resuming sweeps."""

from fp4dse.sweeps.arguments import find_space, shipped_spaces
from fp4dse.sweeps.plan import Plan
from fp4dse.sweeps.searching.search import SearchResult, run_search
from fp4dse.sweeps.state import SweepState, read_state
from fp4dse.sweeps.stopping import stop_sweep
from fp4dse.sweeps.sweep import SweepResult, plan_sweep, run_sweep

__all__ = [
    "Plan",
    "SearchResult",
    "SweepResult",
    "SweepState",
    "find_space",
    "plan_sweep",
    "read_state",
    "run_search",
    "run_sweep",
    "shipped_spaces",
    "stop_sweep",
]
