"""How long a token of a prompt takes at backends, as their first tokens show: what deadlines and policies go by."""

from __future__ import annotations

from collections import deque

#: Samples that an estimate is of, and after how many new ones there is the next.
NUM_SAMPLES = 32
NUM_BETWEEN = 8
#: Shorter prompts say little about it: most of their time is not the prompt's.
LEAST_TOKENS = 32
#: A change of less, in percent, is not worth a new order of those that wait.
LEAST_CHANGE_PERCENT = 25
#: One second.
MOST_PS = 1_000_000_000_000


class PromptTimes:
    """token_ps: picoseconds for each token of a prompt, as last told. The estimate is the quicker quartile of the last
    samples: the others waited there, or shared their step with many.
    """

    def __init__(self, token_ps: int) -> None:
        self.token_ps = token_ps
        self._samples: deque[int] = deque(maxlen=NUM_SAMPLES)
        self._num_new = 0

    def note(self, taken_ns: int, num_tokens: int) -> int | None:
        """A first token took so long, for so many tokens of a prompt that were not cached. Returns a new estimate, if
        it is time for one and it differs.
        """
        if num_tokens < LEAST_TOKENS:
            return None
        self._samples.append(min(taken_ns * 1000 // num_tokens, MOST_PS))
        self._num_new += 1
        if self._num_new < NUM_BETWEEN:
            return None
        self._num_new = 0
        found = max(sorted(self._samples)[len(self._samples) // 4], 1)
        if abs(found - self.token_ps) * 100 < LEAST_CHANGE_PERCENT * self.token_ps:
            return None
        self.token_ps = found
        return found
