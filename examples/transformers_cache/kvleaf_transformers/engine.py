"""A small continuous-batching engine: what a serving loop does with kvleaf, around real models.

    engine = Engine(model, budget_bytes=1 << 26)
    results = engine.generate([Request(prompt, max_new_tokens=16), ...])

Each round it plans one step for all running requests: the next chunk of prompts, one token for
those that decode. The step is queued to a thread that stands for the device, which runs steps
in order: copies and clears first, then the forwards. While it runs, the next step is planned:
tokens whose ids are being sampled are planned before they are known. Steps settle in order.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import kvleaf
import torch
from transformers import PreTrainedModel

from kvleaf_transformers.arena import Arena
from kvleaf_transformers.batch import Batch, Step
from kvleaf_transformers.models import EncoderInput, serve
from kvleaf_transformers.places import Places, leaves_of


@dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    max_new_tokens: int
    eos: int | None = None  # ends the answer, and is its last token
    seed: int | None = None  # None: greedy; else sampled, the same each time
    temperature: float = 1.0
    samples: int = (
        1  # parallel answers, with seeds seed, seed + 1, ...: one prompt computed, then forked
    )
    encoder: EncoderInput | None = None
    adapter: str = ""  # requests of different adapters share nothing
    salt: bytes = b""  # nor do those of different salts


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # [vocabulary] per token, if recorded
    hit_tokens: int = 0  # of the prompt, not computed
    preemptions: int = 0
    forked: bool = False


@dataclass
class Report:
    """What the engine did since it was made."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # prompt tokens that were not computed: prefix hits, and forks' prompts
    resumed_tokens: int = 0  # tokens not computed again when a preempted request came back
    steps: int = 0
    forwards: int = 0
    early_tokens: int = 0  # planned before their ids were known
    forks: int = 0
    preemptions: int = 0
    copies: int = 0
    encoder_runs: int = 0
    encoder_runs_saved: int = 0
    peak_live_bytes: int = 0


def choose(logits: torch.Tensor, request: Request, sample: int, index: int) -> int:
    """The next token: the likeliest; with a seed, one drawn for (seed + sample, its index)."""
    if request.seed is None:
        return int(logits.argmax())
    generator = torch.Generator().manual_seed((request.seed + sample) * 1_000_003 + index)
    uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64).clamp_min(1e-30)
    return int((logits.double() / request.temperature - (-uniform.log()).log()).argmax())


class _Live:
    """A request's way through the engine."""

    def __init__(self, request: Request, id: Hashable, sample: int):
        self.request, self.id, self.sample = request, id, sample
        self.result = Result()
        self.reset()

    def reset(self) -> None:
        self.early = 0  # tokens being sampled
        self.encoder_written = False  # by a forward that was queued
        self.encoder_settled = False  # and the manager knows

    @property
    def last_position(self) -> int:
        """The last token is sampled, not computed."""
        return len(self.request.prompt) + self.request.max_new_tokens - 1

    @property
    def must_fork(self) -> bool:
        """Its prompt serves other samples, which have not left yet."""
        return self.sample == 0 and self.request.samples > 1 and not self.result.tokens


@dataclass
class _Row:
    live: _Live
    new_tokens: int
    ids: list[int] | None  # None: the token that the device sampled last for this request
    index: int | None  # of the token to sample after it; None: nothing is sampled
    encoder_filled: bool


@dataclass
class _Sampled:
    token: int
    logits: torch.Tensor


class Engine:
    """Serves requests of one model from one arena of budget_bytes. One thread owns it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        budget_bytes: int,
        page_tokens: int = 16,
        max_len: int = 512,
        chunk: int = 64,
        max_batch: int = 8,
        steps_in_flight: int = 2,
        leaves: list[kvleaf.KVLeafRegion] | None = None,
        record_logits: bool = False,
        on_step: Callable[["Engine"], None] | None = None,
        **manager_options,
    ):
        """chunk: most prompt tokens of a request in one step. leaves: None: the model's own.
        on_step is called between steps, and may preempt. manager_options: of
        kvleaf.BlockManager, such as retention.
        """
        self.leaves = leaves or leaves_of(model, page_tokens=page_tokens, budget_bytes=budget_bytes)
        self.manager = kvleaf.BlockManager(
            self.leaves,
            budget_bytes,
            page_tokens=page_tokens,
            max_len=max_len,
            max_step_tokens=chunk,
            max_steps_in_flight=steps_in_flight,
            **manager_options,
        )
        self.planner = kvleaf.StepPlanner(
            self.manager, max_batch=max_batch, max_step_tokens=max_batch * chunk
        )
        self.arena = Arena(self.manager.geometry, model.device)
        self.model = serve(model, self.arena, Places.of(model.config, self.leaves))
        self.chunk, self.max_batch, self.steps_in_flight = chunk, max_batch, steps_in_flight
        self.record_logits, self.on_step = record_logits, on_step
        self.report = Report()
        self.answers: list[
            list[Result]
        ] = []  # to all requests so far, also those still being served
        self.waiting: deque[_Live] = deque()
        self.running: list[_Live] = []  # in order of admission
        self._in_flight: deque[tuple[kvleaf.StepPlan, list[_Row], Future]] = deque()
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._last_token: dict[Hashable, int] = {}  # on the device
        self._wait_for_release = False  # after a preemption: nobody comes in until somebody leaves
        self._next_id = 0
        self._samples: dict[Hashable, list[_Live]] = {}  # of requests with several, but the first

    # ---- for callers ---------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> list[list[Result]]:
        """Serves all; per request, one result per sample."""
        everything = []
        for request in requests:
            if request.max_new_tokens < 1 or not request.prompt:
                raise ValueError("a request has a prompt and at least one new token")
            first = _Live(request, self._next_id, 0)
            self._next_id += 1
            self.waiting.append(first)
            samples = [first] + [
                _Live(request, (first.id, s), s) for s in range(1, request.samples)
            ]
            everything.append(samples)
            self.report.requests += request.samples
            self.report.prompt_tokens += request.samples * len(request.prompt)
            self._samples[first.id] = samples[1:]
        self.answers += [[live.result for live in samples] for samples in everything]
        while self.waiting or self.running or self._in_flight:
            self._round()
        return [[live.result for live in samples] for samples in everything]

    def preempt(self, live: _Live) -> None:
        """Takes back what a running request holds; it is admitted again, before those that wait."""
        self._drain()
        if live not in self.running:
            return  # it ended meanwhile
        self.manager.preempt(live.id)
        self.running.remove(live)
        live.reset()
        live.result.preemptions += 1
        self.report.preemptions += 1
        self.waiting.appendleft(live)

    def close(self) -> None:
        self._drain()
        self._device.shutdown()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- one round -----------------------------------------------------------------------------

    def _round(self) -> None:
        self._admit()
        idle = not self._in_flight
        batch = self._next_batch()
        refused = self._begin(batch) if batch else {}
        if batch and len(refused) == len(batch):  # what is in flight may give something back
            self._drain()
            if idle:
                self._make_room(refused)
        elif len(self._in_flight) == self.steps_in_flight or not batch or refused:
            if self._in_flight:
                self._settle_oldest()
            elif self.waiting and not self.running:
                raise self._refusal  # nothing runs, and the first in line is refused
        if self.on_step is not None:
            self.on_step(self)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch and not self._wait_for_release:
            live = self.waiting[0]
            request = live.request
            encoder = request.encoder
            try:
                admission = self.manager.admit(
                    live.id,
                    [*request.prompt, *live.result.tokens],
                    salt=request.salt,
                    adapter=request.adapter,
                    encoder=(encoder.digest, encoder.tokens, encoder.at) if encoder else None,
                )
            except kvleaf.PoolExhausted as refusal:
                self._refusal = refusal
                return
            self.waiting.popleft()
            self.running.append(live)
            if live.result.preemptions:
                self.report.resumed_tokens += admission.hit_tokens
            else:
                live.result.hit_tokens = admission.hit_tokens
                self.report.reused_tokens += admission.hit_tokens
            if encoder is not None:
                live.encoder_written = live.encoder_settled = admission.encoder_cached
                self.report.encoder_runs_saved += admission.encoder_cached

    def _next_batch(self) -> list[_Row]:
        rows = []
        for live in self.running:
            row = self._next_row(live)
            if row is not None:
                rows.append(row)
        return rows

    def _next_row(self, live: _Live) -> _Row | None:
        """The request's share of the next step; None if it has to wait for one in flight."""
        manager, request = self.manager, live.request
        planned, known = manager.planned(live.id), manager.length(live.id)
        if planned >= live.last_position:
            return None  # all is planned; the last token comes out of a step in flight
        if planned >= len(request.prompt):
            if live.must_fork or (request.encoder and not live.encoder_settled):
                return None
        if planned < known:
            end = min(planned + self.chunk, known)
            stop = manager.next_stop(live.id)
            if stop is not None and planned < stop < end:
                end = stop
            tokens = [*request.prompt, *live.result.tokens]
            ids, new = tokens[planned:end], end - planned
        elif live.early:
            ids, new = None, 1  # being sampled
        else:
            return None
        samples = planned + new >= known
        index = len(live.result.tokens) + live.early if samples else None
        return _Row(live, new, ids, index, live.encoder_written)

    def _begin(self, rows: list[_Row]) -> dict:
        """Plans the step and queues it. Gives the requests that did not fit."""
        plan = self.planner.plan([(row.live.id, row.new_tokens) for row in rows])
        served = set(plan.rows)
        rows = [row for row in rows if row.live.id in served]
        if not rows:  # an empty step; it settles in its turn all the same
            nothing: Future = Future()
            nothing.set_result({})
            self._in_flight.append((plan, [], nothing))
            return plan.refused
        for row in rows:
            row.live.encoder_written = True
            if row.index is not None:
                row.live.early += 1
            self.report.early_tokens += row.ids is None
        self.report.steps += 1
        self.report.copies += len(plan.copies)
        live = self.manager.stats().pool.leaves
        held = sum(live[leaf.leaf_id].live * leaf.bytes_per_page for leaf in self.leaves)
        self.report.peak_live_bytes = max(self.report.peak_live_bytes, held)
        future = self._device.submit(self._run, Step.of(plan), rows)
        self._in_flight.append((plan, rows, future))
        return plan.refused

    def _settle_oldest(self) -> None:
        plan, rows, future = self._in_flight.popleft()
        try:
            sampled = future.result()
        except BaseException:
            self._abandon(plan)
            raise
        self.planner.settle(plan.step)
        for row in rows:
            live = row.live
            if live not in self.running:
                continue  # it ended while this step was in flight
            encoder = live.request.encoder
            if encoder is not None and not live.encoder_settled:
                self.manager.encoder_filled(live.id)
                live.encoder_settled = True
            if row.index is None:
                continue
            live.early -= 1
            answer = sampled[live.id]
            if live.must_fork:
                self._fork(live, answer.logits)
            self._append(live, answer)

    def _abandon(self, plan: kvleaf.StepPlan) -> None:
        """This step and those behind it never were. `generate([])` tries them again."""
        for _, _, behind in self._in_flight:
            if not behind.cancel():
                behind.exception()  # it ran, on what the failed step left behind; wait for its end
        self._in_flight.clear()
        self.planner.abandon(plan.step)
        for live in self.running:
            live.early = 0
            live.encoder_written = live.encoder_settled

    def _append(self, live: _Live, answer: _Sampled) -> None:
        live.result.tokens.append(answer.token)
        if self.record_logits:
            live.result.logits.append(answer.logits)
        if (
            answer.token == live.request.eos
            or len(live.result.tokens) == live.request.max_new_tokens
        ):
            self.manager.release(live.id)
            self.running.remove(live)
            self._wait_for_release = False
        else:
            self.manager.append(live.id, [answer.token])

    def _fork(self, parent: _Live, logits: torch.Tensor) -> None:
        """The other samples leave where the prompt ends; one that does not fit now waits."""
        for child in self._samples.pop(parent.id):
            try:
                if len(self.running) >= self.max_batch:
                    raise kvleaf.PoolExhausted("the batch is full")
                self.manager.fork(parent.id, child.id)
            except kvleaf.PoolExhausted:
                self.waiting.append(child)
                continue
            self.running.append(child)
            child.encoder_written = child.encoder_settled = True
            child.result.forked = True
            child.result.hit_tokens = len(child.request.prompt)
            self.report.forks += 1
            self.report.reused_tokens += len(child.request.prompt)
            token = choose(logits, child.request, child.sample, 0)
            self._append(child, _Sampled(token, logits))

    def _make_room(self, refused: dict) -> None:
        """The youngest goes back to the line."""
        if len(self.running) == 1:
            raise next(iter(refused.values()))  # alone, and does not fit
        self.preempt(self.running[-1])
        self._wait_for_release = True

    def _drain(self) -> None:
        while self._in_flight:
            self._settle_oldest()

    # ---- on the device's thread ----------------------------------------------------------------

    @torch.no_grad()
    def _run(self, step: Step, rows: list[_Row]) -> dict[Hashable, _Sampled]:
        """Copies and clears, then the forwards; the tokens sampled, by request."""
        self.arena.copy(step.copies)
        self.arena.clear(step.zero_fills)
        sampled = {}
        for batch in self._forwards(step, rows):
            of = [rows[r] for r in batch.rows]
            ids = [row.ids or [self._last_token[row.live.id]] for row in of]
            end = batch.skip + batch.new_tokens
            ids = [tokens[batch.skip : end] for tokens in ids]
            encoders = [row.live.request.encoder for row in of]
            logits = self.model.forward(batch, torch.tensor(ids), encoders)
            self.report.forwards += 1
            for row, after in zip(of, logits):
                if row.index is None or end < row.new_tokens:
                    continue
                token = choose(after, row.live.request, row.live.sample, row.index)
                self._last_token[row.live.id] = token
                sampled[row.live.id] = _Sampled(token, after.clone())
        self.report.encoder_runs = self.model.encoder_runs
        return sampled

    def _forwards(self, step: Step, rows: list[_Row]) -> Iterator[Batch]:
        """Rows that can run as one: as many new tokens, alike in their states and their encoder."""
        alike: dict[tuple, list[int]] = {}
        for i, row in enumerate(rows):
            encoder = row.live.request.encoder
            key = (
                row.new_tokens,
                self.model.has_states and step.starts[i] > 0,
                encoder.tokens if encoder else 0,
                row.encoder_filled,
            )
            alike.setdefault(key, []).append(i)
        for (new_tokens, goes_on, encoder_tokens, filled), of in alike.items():
            encoder = dict(encoder_tokens=encoder_tokens, encoder_filled=filled)
            if goes_on and new_tokens > 1 and not self.model.goes_on_in_chunks:
                for skip in range(new_tokens):
                    yield Batch(step, of, 1, skip, **encoder)
            else:
                yield Batch(step, of, new_tokens, **encoder)
