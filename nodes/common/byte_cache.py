"""Cache of small files that are made anew when they are gone, such as thumbnails."""

import threading
from collections import OrderedDict
from collections.abc import Hashable


class ByteCache:
    """The last used of many byte strings, in memory. Several threads may use it."""

    def __init__(self, most: int) -> None:
        """most: bytes that are held."""
        self._most, self._held = most, 0
        self._entries: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> bytes | None:
        """Return what was put in under `key`, if it is still held."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Hashable, data: bytes) -> None:
        """Hold `data`; drop what was not used for longest."""
        with self._lock:
            self._held += len(data) - len(self._entries.pop(key, b""))
            self._entries[key] = data
            while self._held > self._most:
                self._held -= len(self._entries.popitem(last=False)[1])
