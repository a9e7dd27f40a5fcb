"""The report of a load test: one HTML file that needs no other, and the figures as JSON.

Owns what is shown and how often errors came. Refuses to compute a figure: `run_summary` does, and
the page shows the same rows that are in `results.json`.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from cartridge_loadtest.report_plots import plots_of, popularity_rows
from cartridge_loadtest.run_summary import Run
from cartridge_loadtest.targets import Verdict

TEMPLATE: Final = Path(__file__).with_name("report.html.j2")
MAX_ERRORS: Final = 20
MAX_CARTRIDGES: Final = 50


def write_report(folder: Path, run: Run, verdict: Verdict, about: Mapping[str, str]) -> Path:
    """Write `results.json` and `report.html`; returns the page's path.

    Args:
        folder: where they go.
        run: what happened.
        verdict: its figures.
        about: what was run, in words, by what it is.
    """
    results = msgspec.json.format(msgspec.json.encode(verdict.rows), indent=2)
    (folder / "results.json").write_bytes(results + b"\n")
    errors = Counter(record.error for record in run.records if record.error is not None)
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    page = environment.from_string(
        TEMPLATE.read_text("utf-8")
    ).render(
        verdict=verdict,
        rows=sorted(verdict.rows, key=lambda row: row.ok is not False),
        about=about,
        # Our own drawing: names in it were escaped by what drew it.
        plots={title: Markup(svg) for title, svg in plots_of(run).items()},  # noqa: S704
        popularity=popularity_rows(run)[:MAX_CARTRIDGES],
        errors=errors.most_common(MAX_ERRORS),
    )
    file = folder / "report.html"
    file.write_text(page, "utf-8")
    return file
