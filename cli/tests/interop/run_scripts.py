"""Runs scripts of this directory one after the other in one process, since importing torch takes longer than most of them.

Reads a line of JSON for each, [working directory, script, arguments...], and answers with one: {"output": ..., "error": ... or null}.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

for line in sys.stdin:
    directory, script, *arguments = json.loads(line)
    os.chdir(directory)
    sys.argv = [script, *arguments]
    output, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(Path(__file__).parent / script), run_name="__main__")
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps({"output": output.getvalue(), "error": error}), flush=True)
