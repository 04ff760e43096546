"""A process that decodes: ``python -m codistill.data.worker SETTINGS`` answers requests, one line of JSON each.

It ends when its standard input does, so it never outlives whoever started it, and it leaves signals to that one.
"""

import json
import mmap
import signal
import sys

from codistill.data.decoding import Decoder, Request


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    descriptor = settings["memory"]
    memory = memoryview(mmap.mmap(descriptor, 0)) if descriptor is not None else None
    decoder = Decoder(settings["image_size"], settings["resize"], memory)
    for line in sys.stdin:
        answers = [decoder.answer(Request(*request)) for request in json.loads(line)]
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
