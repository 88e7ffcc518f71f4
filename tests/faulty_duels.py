"""A process of duels whose faults are told; see ``test_attention_duels``."""

from __future__ import annotations

import os
import pathlib
import sys
import time
from typing import Any

from tracea_jax.tuning.lab.serving import Tell, serve

DIRECTORY, PROBLEMS = "FAULTY_DUELS", "FAULTY_DUELS_PROBLEMS"
FAULTS = ("none", "lost once", "hangs", "garbage", "raises")


def main() -> None:
    told = (line.split("|", 1) for line in os.environ[PROBLEMS].splitlines())
    faults = {problem: fault for fault, problem in told}

    def answer(race: Any, tell: Tell) -> Any:
        match faults[str(race.problem)]:
            case "lost once":
                tried = pathlib.Path(os.environ[DIRECTORY]) / "tried"
                if not tried.exists():
                    tried.touch()
                    os.abort()
            case "hangs":
                time.sleep(1000)
            case "garbage":
                os.write(int(sys.argv[-1]), b"no frame at all, but some bytes" * 9)
            case "raises":
                raise RuntimeError("INTERNAL: capturing stream has unjoined work")
        return race

    serve(answer)


if __name__ == "__main__":
    main()
