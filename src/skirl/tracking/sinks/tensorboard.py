"""TensorBoard events by tensorboard's own writer, the one under torch.utils.tensorboard, so without torch."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skirl.errors import MissingExtra

__all__ = ["TensorBoardSink"]


class TensorBoardSink:
    """One scalar a metric. Values that are not finite are left out.

    Args:
        directory: directory of the event files.
        first_step: the run continues with this step: TensorBoard hides what an earlier process wrote from it on.
            None for a run that starts.

    Raises:
        MissingExtra: tensorboard is not installed.
    """

    def __init__(self, directory: Path, first_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtra(
                f"run.tensorboard needs the package tensorboard ({error}): run `pip install tensorboard`, "
                "or set run.tensorboard to false"
            ) from error
        # Any: generated protobuf modules make their classes when they are loaded, where no type checker sees them.
        self._event_pb2: Any = event_pb2
        self._summary_pb2: Any = summary_pb2
        self._writer = EventFileWriter(str(directory))
        if first_step is not None:
            # TensorBoard's own mark of a restart: its readers drop earlier events from this step on.
            start = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
            self._add(step=first_step, session_log=start)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One event with every value, on disk when this returns."""
        scalars = [
            self._summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        self._add(step=step, summary=self._summary_pb2.Summary(value=scalars))
        self._writer.flush()

    def close(self) -> None:
        """Ends the writer's thread."""
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.add_event(self._event_pb2.Event(wall_time=time.time(), **fields))
