"""When a run is to end because its time is up: `--save-before` and `--time-limit`, for the launcher.

--save-before 5m                     before the end of the batch job, as Slurm says it
--time-limit 11h30m                  after the launcher's start; with --save-before, so much earlier
"""

from __future__ import annotations

import re
import time
from typing import Final

from hytrain.config import job_end
from hytrain.errors import ConfigError

_SECONDS: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION: Final = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def end_s(save_before: str | None, time_limit: str | None) -> float | None:
    """The time of the monotonic clock at which the run is to end; None if it may take as long as it likes.

    Raises `ConfigError` for what is no duration, if no end is known, and if it is over already.
    """
    if save_before is None and time_limit is None:
        return None
    left: list[float] = [] if time_limit is None else [_seconds("--time-limit", time_limit)]
    if save_before is not None and (ends := job_end()) is not None:
        left.append(ends - time.time())
    if not left:
        raise ConfigError(
            f"--save-before {save_before}: when does the job end? Slurm says it in SLURM_JOB_END_TIME, which is not "
            "set; name it with --time-limit 11h30m, counted from now"
        )
    left_s = min(left) - (0 if save_before is None else _seconds("--save-before", save_before))
    if left_s <= 0:
        raise ConfigError(
            f"--save-before {save_before}: the job ends in {min(left):.0f} s, so there is no time to train"
        )
    return time.monotonic() + left_s


def _seconds(option: str, text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{option} {text}: a time such as 90s, 5m or 11h30m")
    return sum(int(number or 0) * seconds for number, seconds in zip(match.groups(), _SECONDS.values(), strict=True))
