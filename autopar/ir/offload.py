"""What the cost model and the runtime agree on about what lives in the host's memory."""

from __future__ import annotations

STATE_BUCKET_NUMEL = 2**22
"""Offloaded optimizer state is brought to the device in buckets: parameters, one after the other,
until they have so many elements. Copies of 16 MiB reach what the link has.
"""

STATE_BUCKETS = 3
"""So many buckets are on the device at a time: one that comes, one that is stepped, one that goes.
"""

ACTIVATION_BUFFERS = 3
"""Of so many offloaded forwards what they keep is on the device at a time, at most
(``offload_actions``).
"""
