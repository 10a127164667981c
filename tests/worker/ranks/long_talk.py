"""A schedule of sequences whose contexts grow over the KV groups of a replica, as the core lays them out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from eventlm.core.shards import group_of
from eventlm.sampling_params import SamplingParams
from eventlm.worker.protocol import StepOutput, StepPayload
from tests.worker.launches import launched, new_sequence
from tests.worker.ranks.replica import PARAMS


class LongTalk:
    """Runs the same launches on whatever holds `num_groups` times `num_blocks` blocks, one worker or several.

    Contexts begin in all groups, share prefixes, are preempted and come again. forced: what another run has drawn, with
    which sequences go on in place of what this one draws.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        num_groups: int,
        shard_tokens: int,
        block_size: int,
        num_blocks: int,
        num_shards: int,
        forced: Sequence[StepOutput] = (),
    ) -> None:
        self._forced = forced
        self._rng = random.Random(7)
        self._vocab_size, self._num_groups, self._shard_tokens = vocab_size, num_groups, shard_tokens
        self._block_size, self._num_blocks, self._num_shards = block_size, num_blocks, num_shards
        self._free = [list(range(group * num_blocks, (group + 1) * num_blocks)) for group in range(num_groups)]
        self._step = 0
        self.outputs: list[StepOutput] = []

    def run(self, runner: Any, *, num_decodes: int = 5) -> list[StepOutput]:
        """The output of every step."""
        lengths = [self._shard_tokens * shards - 3 for shards in range(1, self._num_shards + 1)]
        prompts = [[self._rng.randrange(5, self._vocab_size) for _ in range(length)] for length in lengths]
        # The second and the third begin alike.
        half = self._shard_tokens
        prompts[2][:half] = prompts[1][:half]
        histories = [list(prompt) for prompt in prompts]
        params = [SamplingParams(**PARAMS[number % len(PARAMS)], ignore_eos=True) for number in range(len(prompts))]
        tables: list[list[int]] = [[] for _ in prompts]
        firsts = [number % self._num_groups for number in range(len(prompts))]
        firsts[2] = firsts[1]

        def new(number: int) -> Any:
            return new_sequence(
                number,
                list(histories[number]),
                num_prompt_tokens=len(prompts[number]),
                params=params[number],
            )

        def prefill(number: int, start: int = 0) -> None:
            end, is_first = len(histories[number]), True
            while start < end:
                # No chunk crosses the end of a shard.
                shard_end = (start // self._shard_tokens + 1) * self._shard_tokens
                stop = min(start + 2 * self._shard_tokens // 3, shard_end, end)
                fresh = self._grow(tables[number], firsts[number], stop)
                index = 0 if is_first else len(tables[number]) - len(fresh)
                others = [each for each in range(number) if tables[each]][-2:]
                rows = [self._decode(each, histories, tables, firsts) for each in others]
                output = self._run(
                    runner,
                    StepPayload(new=[new(number)] if is_first else []),
                    decodes=[row for row, _ in rows],
                    chunks=[(number, 0, start, stop - start, int(stop == end))],
                    blocks=[(at, index, blocks) for at, (_, (index, blocks)) in enumerate(rows) if blocks]
                    + [(len(rows), index, tables[number][index:])],
                )
                for each, tokens in zip([*others, number], output.tokens, strict=True):
                    histories[each].extend(tokens)
                start, is_first = stop, False

        for number in range(len(prompts)):
            if number == 2:
                tables[2] = tables[1][: half // self._block_size]
            prefill(number, half if number == 2 else 0)
        for _ in range(num_decodes):
            self._decode_all(runner, range(len(prompts)), histories, tables, firsts)
        # The longest is preempted, and comes back in other groups.
        last = len(prompts) - 1
        self._give_back(tables[last])
        self._decode_all(runner, range(last), histories, tables, firsts, forget=[(last, 0)])
        tables[last], firsts[last] = [], (firsts[last] + 1) % self._num_groups
        prefill(last)
        for number, kind in ((last + 1, "pool"), (last + 2, "score")):
            histories.append(list(prompts[-1][: 2 * self._shard_tokens + 5]))
            params_of = SamplingParams(pooling="mean") if kind == "pool" else SamplingParams()
            self._read(runner, number, histories[-1], kind, (number + 1) % self._num_groups, params_of)
        self._decode_all(runner, range(len(prompts)), histories, tables, firsts)
        return self.outputs

    def _read(self, runner: Any, number: int, tokens: list[int], kind: Any, first: int, params: SamplingParams) -> None:
        table: list[int] = []
        for start in range(0, len(tokens), self._shard_tokens):
            stop = min(start + self._shard_tokens, len(tokens))
            fresh = self._grow(table, first, stop)
            new = [] if start else [new_sequence(number, tokens, kind=kind, params=params)]
            self._run(
                runner,
                StepPayload(new=new),
                chunks=[(number, 0, start, stop - start, 0)],
                blocks=[(0, len(table) - len(fresh), fresh)],
            )
        self._give_back(table)
        self._run(runner, StepPayload(), forget=[(number, 0)])

    def _decode_all(self, runner: Any, numbers: range, histories: Any, tables: Any, firsts: Any, **others: Any) -> None:
        rows = [self._decode(number, histories, tables, firsts) for number in numbers]
        output = self._run(
            runner,
            StepPayload(),
            decodes=[row for row, _ in rows],
            blocks=[(at, index, blocks) for at, (_, (index, blocks)) in enumerate(rows) if blocks],
            **others,
        )
        for number, tokens in zip(numbers, output.tokens, strict=True):
            histories[number].extend(tokens)

    def _decode(self, number: int, histories: Any, tables: Any, firsts: Any) -> tuple[Any, Any]:
        """A row, and where blocks are written of its table."""
        length = len(histories[number])
        fresh = self._grow(tables[number], firsts[number], length)
        return (number, 0, length, 0), (len(tables[number]) - len(fresh), fresh)

    def _grow(self, table: list[int], first_group: int, length: int) -> list[int]:
        before = len(table)
        while len(table) * self._block_size < length:
            group = group_of(len(table) * self._block_size, first_group, self._shard_tokens, self._num_groups)
            table.append(self._free[group].pop(0))
        return table[before:]

    def _give_back(self, table: list[int]) -> None:
        for number in table:
            self._free[number // self._num_blocks].append(number)

    def _run(self, runner: Any, payload: StepPayload, **fields: Any) -> StepOutput:
        if self._forced:
            payload = structs.replace(payload, forced=self._forced[self._step].tokens)
        output: StepOutput = runner.execute(launched(self._step, **fields), payload)
        self._step += 1
        self.outputs.append(output)
        return output._replace(tokens=payload.forced) if payload.forced else output
