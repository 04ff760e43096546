"""What a user should hear about data before training: labels made wrong on purpose, files that are not read."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from PIL import Image

from codistill.data.decoding import SUFFIXES
from codistill.data.listing import kinds

READ = f"only {', '.join(sorted(SUFFIXES))} are read"


def remarks(report: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Logging levels and messages about the data that ``report`` describes."""
    wrong = report.get("wrong_labels", {})
    if count := wrong.get("count"):
        total = report["sets"]["train"]["images"]
        yield (
            logging.INFO,
            f"{count:,} of {total:,} training labels ({count / total:.0%}) are replaced by wrong ones: "
            f"data.wrong_labels={wrong['share']}; data.wrong_labels=0 trains on the true ones",
        )
    if left_out := kinds(report.get("ignored", ())):
        is_image = any(suffix in Image.registered_extensions() for suffix in left_out)
        yield logging.WARNING if is_image else logging.INFO, f"{counted(left_out)}; {READ}"


def counted(left_out: Mapping[str, int]) -> str:
    """The files left out, in words: ``33 files are left out: .webp 32, .txt 1``."""
    total = sum(left_out.values())
    listed = ", ".join(f"{suffix} {count:,}" for suffix, count in left_out.items())
    return f"{total:,} {'file is' if total == 1 else 'files are'} left out: {listed}"
