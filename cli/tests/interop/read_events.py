"""Prints the scalars of a directory of event files, as TensorBoard reads them: tag -> [[step, value], ...]."""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
scalars = {
    tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
}
print(json.dumps(scalars))
