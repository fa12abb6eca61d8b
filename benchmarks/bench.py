"""`make bench`: what people wait for, measured side by side with the floor and with what they would use otherwise.

Names choose some of the benchmarks; without any all are run. Absolute times drift on shared machines: quote ratios.
"""

import sys

import inspection
import loop
import many
import remote
import storing

BENCHMARKS = {
    "storing": storing.main,
    "remote": remote.main,
    "many": many.main,
    "loop": loop.main,
    "inspection": inspection.main,
}


def main():
    for name in sys.argv[1:] or BENCHMARKS:
        print(f"== {name}", flush=True)
        BENCHMARKS[name]()


if __name__ == "__main__":
    main()
