"""Parsing of a user's list of devices."""

import re

THIS_ONE, ALL = "this one", "all"


def listed_devices(text: str, device_count: int, current: int, on_cpu: bool = False) -> list[int]:
    """Return the numbers of the devices that `text` names, in its order.

    text: 'this one', 'all', or numbers with commas between them.
    device_count: number of available devices, numbered from 0.
    current: number of the default device.
    on_cpu: a list of n numbers means n processes on the CPU, whatever the numbers are.

    Raises ValueError for anything else.
    """
    plain = " ".join(text.lower().split())
    if plain == THIS_ONE:
        return [current]
    if plain == ALL:
        return list(range(device_count))
    if not re.fullmatch(r"[0-9]{1,4}( ?, ?[0-9]{1,4})*", plain):
        raise ValueError(f"devices is {text[:40]!r}; write '{THIS_ONE}', '{ALL}', or numbers such as 0,1.")
    numbers = [int(number) for number in plain.split(",")]
    if twice := [number for number in numbers if numbers.count(number) > 1]:
        raise ValueError(f"devices is {text[:40]!r}, which names device {twice[0]} twice; name each one once.")
    if not on_cpu and max(numbers) >= device_count:
        available = (
            "one device, which is number 0"
            if device_count == 1
            else f"{device_count} devices, numbered 0 to {device_count - 1}"
        )
        raise ValueError(
            f"devices is {text[:40]!r}, but this ComfyUI sees {available}; name only those, or write '{ALL}'."
        )
    return numbers
