"""`hytrain-cluster`, for which an hour has passed as soon as there is the file that the first argument names.

So a test decides when the time is up, and which signal is no copy of the first, however busy the machine is.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

from workers import launcher, supervisor

later = Path(sys.argv[1])
supervisor.time = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0 * later.exists(), strftime=time.strftime)
supervisor.TOUCH_EVERY_S = 0.05  # it looks at the time as often
supervisor.COPY_S = 60.0
sys.exit(launcher.main(sys.argv[2:]))
