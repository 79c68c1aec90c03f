"""Dates in file names, in the pattern that the browser fills in for core's Save Image."""

import re
from datetime import datetime

_DATE = re.compile(r"%date:([^%]*)%")
_PART = re.compile(r"yyyy|yy|MM?|dd?|hh?|mm?|ss?")


def fill_in_dates(text: str, timestamp: datetime) -> str:
    """Fill in `%date:<form>%`.

    The form is made of yyyy or yy, MM (month), dd, hh (of 24), mm and ss. A single letter drops the leading zero.
    """

    def number(match: re.Match[str]) -> str:
        part = match[0]
        if part[0] == "y":
            return f"{timestamp:%Y}"[-len(part) :]
        values = {
            "M": timestamp.month,
            "d": timestamp.day,
            "h": timestamp.hour,
            "m": timestamp.minute,
            "s": timestamp.second,
        }
        return f"{values[part[0]]:0{len(part)}}"

    return _DATE.sub(lambda date: _PART.sub(number, date[1]), text)
