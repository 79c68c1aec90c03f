"""Products of the small factors of an adapter, beside a frozen Linear."""
