"""Run every query of the dashboard: `python deploy/dashboard_check.py [http://localhost:9090]`.

Use it after some traffic. A panel stays empty if its query is no PromQL, finds nothing, or finds only NaN. The exit
status is 1 if there is such a panel. Quantiles of what only a loss brings about may be NaN: nothing was lost. The panel
of adapters may be empty: engines without --enable-lora have none.
"""

import json
import math
import re
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

DASHBOARD = Path(__file__).parent / "grafana/dashboards/quire.json"
INTERVAL = "1m"  # for Grafana's $__rate_interval
OF_LOSSES = re.compile(r"_(detection|recovery)_seconds_bucket")
OF_ADAPTERS = re.compile(r"lora_requests_info")


def main(url: str = "http://localhost:9090") -> int:
    """Return the exit status."""
    empty = 0
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            numbers = values(url, target["expr"].replace("$__rate_interval", INTERVAL))
            if not OF_LOSSES.search(target["expr"]):
                numbers = [number for number in numbers if not math.isnan(number)]
            empty += not numbers and not OF_ADAPTERS.search(target["expr"])
            print(f"{panel['title']:32} {target['legendFormat']:40} {formatted(numbers)}")
    return 1 if empty else 0


def values(url: str, query: str) -> list[float]:
    """Return the present values of the query."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}") as response:
            answer: dict[str, Any] = json.load(response)
    except HTTPError as error:
        with error:
            print(error.read().decode())
        return []
    return [float(series["value"][1]) for series in answer["data"]["result"]]


def formatted(numbers: list[float]) -> str:
    return " ".join(f"{number:.4g}" for number in numbers[:8]) if numbers else "EMPTY"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
