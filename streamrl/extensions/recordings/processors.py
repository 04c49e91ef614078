"""The processors of a run: the parts whose outputs can be computed again from their journals."""

from __future__ import annotations

from typing import Any

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config.run_file import RunFile
from streamrl.extensions.assembler import process as assembler
from streamrl.stream.processor.definition import Processor


def processors_of(run: RunFile) -> dict[str, Processor[Any, Any]]:
    """The processors of the run by name, in the order of the loop."""
    processors: list[Processor[Any, Any]] = []
    if run.session_envs:
        processors.append(assembler.make_processor(run))
    processors += buffer.shards(run)
    processors.append(batcher.make_processor(run))
    return {processor.name: processor for processor in processors}
