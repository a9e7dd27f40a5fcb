"""Routing cards for the benchmark's quarterly filings, drafted from their own covers.

Owns the rules: who files, by what names. Refuses to see a question.
"""

import re

_REGISTRANT = re.compile(r"([^\n]+)\n+\s*\(exact name of registrant", re.IGNORECASE)
_COMPANY = re.compile(
    r"\b([A-Z][\w&]*(?: [A-Z][\w&]*){0,3}),? (?:Inc\.|Corporation|Corp\.|Company|Ltd)"
)
_LEGAL_FORM = re.compile(
    r"(\.com)?[,\s]+(inc|corp|corporation|co|company|ltd|plc)\.?$", re.IGNORECASE
)


def filing_aliases(text: str) -> tuple[str, ...]:
    """The registrant's name from the cover, whole and without its legal form."""
    cover = _REGISTRANT.search(text)
    if cover:
        names = [cover[1].strip()]
    else:
        # No such line: the company that the filing names most often.
        found = [match[0] for match in _COMPANY.finditer(text)]
        names = [max(sorted(set(found)), key=found.count)] if found else []
    names += [_LEGAL_FORM.sub("", name) for name in names]
    return tuple(dict.fromkeys(name for name in names if name))
