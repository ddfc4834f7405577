"""What the cost model and the runtime agree on about state that lives in the host's memory."""

from __future__ import annotations

STATE_BUCKET_NUMEL = 2**22
"""Offloaded optimizer state is brought to the device in buckets: parameters, one after the other,
until they have so many elements. Copies of 16 MiB reach what the link has.
"""

STATE_BUCKETS = 3
"""So many buckets are on the device at a time: one that comes, one that is stepped, one that goes.
"""
