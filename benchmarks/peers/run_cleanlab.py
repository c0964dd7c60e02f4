"""cleanlab in a process of its own: a line of JSON with labels and predicted probabilities in, a line with scores out.

    .venv-cleanlab/bin/python benchmarks/peers/run_cleanlab.py

In: {"labels": [n], "probabilities": [n, c]} (out of sample). Out: {"quality": label quality scores [n], "issues": which
labels it calls wrong [n]}, both by cleanlab's defaults. The first line that it writes says its version. Imports neither
torch nor tangency; benchmarks.studies.wrong_labels starts it.
"""

import json
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
from cleanlab.filter import find_label_issues  # type: ignore[import-not-found]
from cleanlab.rank import get_label_quality_scores  # type: ignore[import-not-found]


def scored(given: dict[str, Any]) -> dict[str, Any]:
    """What cleanlab says of the labels; `error` where it refuses them."""
    labels, probabilities = np.array(given["labels"]), np.array(given["probabilities"], dtype=np.float64)
    try:
        issues = find_label_issues(labels, probabilities, n_jobs=1)
        quality = get_label_quality_scores(labels, probabilities)
    except ValueError as e:
        return {"error": str(e)}
    return {"quality": quality.tolist(), "issues": issues.astype(int).tolist()}


def main() -> None:
    """Answer until the input ends."""
    print(json.dumps({"cleanlab": version("cleanlab")}), flush=True)
    for line in sys.stdin:
        print(json.dumps(scored(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
