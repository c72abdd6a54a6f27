"""`schemathesis` against a running server: `python tests/clients/schemathesis_client.py URL`. Prints JSON.

Draws requests from the server's own OpenAPI description, and ones that break it: no 5xx, no status, type or shape of
an answer that is not described, and what breaks the description must be refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("negative_data_rejection", "unsupported_method", "allow_header_conformance"),
)
MAX_EXAMPLES = 25  # of each operation


def main(argv: list[str]) -> int:
    """Runs it."""
    (url,) = argv
    program = Path(sys.executable).parent / "schemathesis"
    options = ["--phases", "fuzzing", "--max-examples", str(MAX_EXAMPLES), "--seed", "1", "--no-color"]
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        command = [str(program), "run", f"{url}/openapi.json", *options, "--continue-on-failure"]
        command += ["--checks", ",".join(CHECKS), "--report", "json", "--report-json-path", str(report)]
        code = subprocess.run(command, cwd=place, check=False, stdout=sys.stderr).returncode
        found = json.loads(report.read_text())
    print(
        json.dumps({"client": "schemathesis", **{name: found[name] for name in ("test_cases", "failures", "errors")}})
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
