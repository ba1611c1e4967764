"""Ask a Prometheus every query of the dashboard: `python deploy/dashboard_check.py [http://localhost:9090]`.

For use after some traffic. A query that is no PromQL, or that finds nothing, is a panel that stays empty; so is one
whose values are all NaN. Exit status 1 if there is one.
"""

import json
import math
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

DASHBOARD = Path(__file__).parent / "grafana/dashboards/quire.json"
INTERVAL = "1m"  # for Grafana's $__rate_interval


def main(url: str = "http://localhost:9090") -> int:
    """The exit status."""
    empty = 0
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            found = values(url, target["expr"].replace("$__rate_interval", INTERVAL))
            empty += not found
            print(f"{panel['title']:32} {target['legendFormat']:40} {shown(found)}")
    return 1 if empty else 0


def values(url: str, query: str) -> list[float]:
    """What the query finds now, without NaN."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}") as response:
            answer: dict[str, Any] = json.load(response)
    except HTTPError as error:
        with error:
            print(error.read().decode())
        return []
    found = [float(series["value"][1]) for series in answer["data"]["result"]]
    return [value for value in found if not math.isnan(value)]


def shown(found: list[float]) -> str:
    return " ".join(f"{value:.4g}" for value in found[:8]) if found else "EMPTY"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
