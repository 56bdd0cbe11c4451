"""Space × tasks × seeds → jobs → stored rows: planning, executing and resuming sweeps.

jobs             what a worker is given and leaves
executors        where jobs run
planning         what a sweep would train, before anything is trained
running          a sweep or a search while it runs
searching        samplers that propose what is trained next
stages           studies of several sweeps, of which one chooses what the next trains
dashboard        optuna-dashboard over a store
bench            what all that costs, beside workers that only wait

sweep            a sweep from end to end; conclusions: what it says at its end; arguments: what people type
stores           those on this machine
weights          the weights that a lane ends with
"""

from fp4dse.sweeps.arguments import find_space, shipped_spaces
from fp4dse.sweeps.planning.plan import Plan
from fp4dse.sweeps.running.state import SweepState, read_state
from fp4dse.sweeps.running.stopping import stop_sweep
from fp4dse.sweeps.searching.search import SearchResult, run_search
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
