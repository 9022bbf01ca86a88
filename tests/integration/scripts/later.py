"""`hytrain-cluster`, for which an hour has passed as soon as there is the file that the first argument names.

So a test decides when the time is up, and which signal is no copy of the first, however busy the machine is.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

from workers.launch import cluster, launcher, signals, supervisor

later = Path(sys.argv[1])
clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0 * later.exists(), strftime=time.strftime)
for module in (cluster, signals, supervisor):
    module.time = clock
cluster.TOUCH_EVERY_S = 0.05  # it looks at the time as often
signals.COPY_S = 60.0
sys.exit(launcher.main(sys.argv[2:]))
