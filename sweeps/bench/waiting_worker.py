"""A worker that waits instead of training: `waiting_worker.py SECONDS LOG`. Needs nothing but Python, so that it starts
at once and what is measured is the driver.

It speaks as tasks/worker.py does. The time at which it was given each job is added to LOG as a line.
"""

import json
import os
import sys
import time

OUTCOME: dict[str, object] = {"status": "done", "diverged_step": None, "val_loss": 1.0, "val_metric": None}
OUTCOME |= {"train_loss_min": 1.0, "train_loss_final": 1.0, "metrics": {}}
OUTCOME |= {"curve_step": list(range(1, 65)), "curve_loss": [1.0] * 64}
SHARED = {"train_s": 1.0, "setup_s": 0.0, "quantizer_backend": "none", "gemm_backend": "none", "fallbacks": []}


def main(seconds: float, log: str) -> None:
    for line in sys.stdin:
        with open(log, "a") as file:
            file.write(f"{time.time()}\n")
        job_file, out_file, _ = json.loads(line)
        with open(job_file) as file:
            lanes = len(json.load(file)["lanes"])
        for step in range(1, 6):
            time.sleep(seconds / 5)
            report = {"phase": "train", "step": step, "steps": 5, "losses": [1.0] * lanes}
            print(json.dumps(report), flush=True)
        hidden = f"{out_file}.tmp"
        with open(hidden, "w") as file:
            json.dump({"lanes": [OUTCOME] * lanes, "peak_memory_bytes": 0, **SHARED}, file)
        os.replace(hidden, out_file)
        print('{"exit": 0}', flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
