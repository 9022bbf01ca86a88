"""Closed forms for k, the fraction of the parameters that the GPU owns.

Owns the arithmetic of the published policy "balance" and of our own first guess. Both use the profile's totals, as if
layers were uniform and copies took no time. `policies.py` rounds them to whole layers and checks memory.

    |<------- t_B ------->|<------ t_F ------>|      backward, then the next step's forward
         |<------------ t_U, the CPU's updates ------------>|
                                    the GPU takes over what is late
"""

from __future__ import annotations

from hytrain.planner.profile import Profile


def balance_k(profile: Profile) -> float:
    """(t_U - t_B) / ((1 + alpha) t_U): CPU and GPU finish their updates at the same time.

    Source: HyTrainDNN. alpha is the measured GPU update time over the CPU's.
    """
    t_u = profile.cpu_update_s
    return _clamped((t_u - profile.backward_s) / ((1 + profile.alpha) * t_u)) if t_u else 0.0


def deadline_k(profile: Profile) -> float:
    """The least k without stalls, for uniform layers and copies that do not queue. Source: ours.

    Between the backward of layer l and its next forward, the CPU must update it and all above it:
    (l - k) c <= (l - 1)(t_b + t_f) + k g for every l > k, counting layers in forward order from 1. That is linear in
    l, so the last and the first CPU-owned layer decide. With n layers, the last requires
    k >= (t_U - (1 - 1/n)(t_B + t_F)) / ((1 + alpha) t_U). The first has no other layer's work to hide in and pays for
    the copies: c + d2h + h2d <= k (t_b + t_f + g). The loop's work between backward and forward is slack for both.
    """
    t_u = profile.cpu_update_s
    if not t_u:
        return 0.0
    count = len(profile.layers)
    work_s = profile.backward_s + profile.forward_s
    for_the_last = (t_u - (1 - 1 / count) * work_s - profile.other_s) / ((1 + profile.alpha) * t_u)
    trips_s = sum(layer.d2h_s + layer.cpu_update_s + layer.h2d_s for layer in profile.layers)
    hiding_s = work_s + profile.gpu_update_s
    for_the_first = (trips_s / count - profile.other_s) / hiding_s if hiding_s else 1.0
    return _clamped(max(for_the_last, for_the_first))


def prefix_for(k: float, profile: Profile) -> frozenset[int]:
    """The first layers in forward order with at least the fraction k of the parameters. ValueError outside [0, 1]."""
    if not 0 <= k <= 1:
        raise ValueError(f"k must be a number in [0, 1], got {k!r}")
    numel = profile.numel
    wanted = k * numel
    lids = set()
    for layer in profile.layers:
        if wanted <= 1e-9 * numel:  # k = 0.3 of ten layers is three, despite binary rounding
            break
        lids.add(layer.lid)
        wanted -= layer.numel
    return frozenset(lids)


def _clamped(k: float) -> float:
    return min(1.0, max(0.0, k))
