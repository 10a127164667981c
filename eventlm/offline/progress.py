"""The progress bar of a call: prompts done, and tokens per second in and out."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from eventlm.offline.outputs import EmbeddingRequestOutput, RequestOutput

#: Whether to show a bar, or a function that makes it, like `functools.partial(tqdm, leave=False)`.
UseTqdm = bool | Callable[..., Any]


class Progress:
    """A bar over `num_prompts`. Use it in the calling thread: notebooks show no other thread's output."""

    def __init__(self, use_tqdm: UseTqdm, num_prompts: int) -> None:
        self._bar: Any = None
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        if not use_tqdm:
            return
        from tqdm.auto import tqdm

        make = tqdm if isinstance(use_tqdm, bool) else use_tqdm
        self._bar = make(total=num_prompts, desc="Processed prompts", dynamic_ncols=True)

    def add(self, output: RequestOutput | EmbeddingRequestOutput) -> None:
        """A prompt is done."""
        if self._bar is None:
            return
        self._num_prompt_tokens += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            self._num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = self._bar.format_dict["elapsed"] or 1e-9
        self._bar.set_postfix_str(
            f"input: {self._num_prompt_tokens / elapsed:.1f} toks/s, "
            f"output: {self._num_output_tokens / elapsed:.1f} toks/s",
            refresh=False,
        )
        self._bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
