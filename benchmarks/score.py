"""Estimates of public runs beside what was measured: `python benchmarks/score.py DATA`.

DATA is a folder of tables of runs (docs/reference/rows.md says their columns; tables of other
things are left out). Estimates all rows as `autopar estimate` does, prints how long that took, and
writes them. With `--tool` it then runs `TOOL PRED.csv DATA`, which prints the errors.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Estimate all tables of a folder, and have them scored."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("-o", "--output", type=Path, default=Path("pred.csv"), metavar="PRED.csv")
    parser.add_argument("--tool", type=Path, metavar="TOOL", help="a script that prints errors")
    parser.add_argument("--jobs", type=int, metavar="N")
    arguments = parser.parse_args()

    from autopar.api import check_writable, estimate_rows, write_text
    from autopar.estimation import EstimateRow, read_rows
    from autopar.estimation.predictions import to_csv
    from autopar.ir.errors import InputError

    check_writable(arguments.output, "estimates")
    rows: list[EstimateRow] = []
    for path in sorted(arguments.data.glob("*.csv")):
        try:
            table = read_rows(path)
        except InputError as error:
            print(f"{path.name}: left out: {error.what}")
            continue
        print(f"{path.name}: {len(table.rows)} rows, {len(table.problems)} problems")
        for problem in table.problems:
            print(f"  {problem}")
        rows += table.rows
    started = time.perf_counter()
    records = estimate_rows(rows, jobs=arguments.jobs)
    seconds = time.perf_counter() - started
    write_text(arguments.output, to_csv(records), "estimates")
    failed = [record for record in records if record["error"]]
    for record in failed:
        print(f"  {record['id']}: {record['error']}")
    print(
        f"{len(records) - len(failed)} rows of {len({row.shape for row in rows})} models estimated "
        f"in {seconds:.0f} s on {arguments.jobs or len(os.sched_getaffinity(0))} processes, "
        f"{platform.processor() or platform.machine()}"
    )
    if arguments.tool is not None:
        command = [sys.executable, str(arguments.tool), str(arguments.output), str(arguments.data)]
        sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
