"""In-memory cache of small files that can be made again, such as thumbnails."""

import threading
from collections import OrderedDict
from collections.abc import Hashable


class ByteCache:
    """Thread-safe LRU cache of byte strings."""

    def __init__(self, capacity: int) -> None:
        """capacity: bytes held at most."""
        self._capacity, self._size = capacity, 0
        self._entries: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> bytes | None:
        """Return the bytes stored under `key`; None if missing or evicted."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Hashable, data: bytes) -> None:
        """Store `data`; evict the least recently used entries."""
        with self._lock:
            self._size += len(data) - len(self._entries.pop(key, b""))
            self._entries[key] = data
            while self._size > self._capacity:
                self._size -= len(self._entries.popitem(last=False)[1])
