"""The same requests by the engine and by the model's own default cache, side by side.

    outcome = compare("llama")

Requests come in three waves, so that each can reuse what those before left: prompts with a
common start (the second one shows where states should be kept, the third one finds them there),
repeated prompts, answers that end early, parallel samples, and for models with an encoder the
same and different inputs.
"""

import hashlib
from dataclasses import dataclass
from functools import cache

import torch
from kvleaf_transformers import EncoderInput, Engine, Request, Result
from kvleaf_transformers.engine import Report, choose
from small_models import VOCABULARY, make
from transformers import PreTrainedModel

PAGE_TOKENS = 8


@dataclass
class Outcome:
    model: str
    report: Report
    requests: list[Request]
    results: list[list[Result]]
    expected: list[list[Result]]
    preempted: int

    def max_difference(self) -> float:
        """Of logits, over all tokens of all requests."""
        return max(
            float((a - b).abs().max())
            for ours, theirs in zip(self.results, self.expected)
            for x, y in zip(ours, theirs)
            for a, b in zip(x.logits, y.logits)
        )

    def wrong_tokens(self) -> int:
        return sum(
            x.tokens != y.tokens
            for ours, theirs in zip(self.results, self.expected)
            for x, y in zip(ours, theirs)
        )


def by_default_cache(model: PreTrainedModel, request: Request, sample: int = 0) -> Result:
    """The prompt in one forward, then token by token, over the model's own cache."""
    result, past = Result(), None
    names = ("decoder_input_ids", "decoder_position_ids")
    if not model.config.is_encoder_decoder:
        names = ("input_ids", "position_ids")
    encoder = request.encoder
    with torch.no_grad():
        ids, at = list(request.prompt), 0
        while True:
            arguments = {
                names[0]: torch.tensor([ids]),
                names[1]: torch.arange(at, at + len(ids))[None],
            }
            if encoder is not None and model.config.is_encoder_decoder:
                arguments |= encoder.inputs
            elif encoder is not None:
                arguments |= encoder.inputs if past is None else {}
                sees = torch.arange(at, at + len(ids)) >= encoder.at
                mask = encoder.inputs["aspect_ratio_mask"][:, None] * sees[None, :, None, None]
                arguments["cross_attention_mask"] = mask
            output = model(**arguments, past_key_values=past, use_cache=True)
            past, logits = output.past_key_values, output.logits[0, -1]
            at += len(ids)
            ids = [choose(logits, request, sample, len(result.tokens))]
            result.tokens += ids
            result.logits.append(logits.clone())
            if ids[0] == request.eos or len(result.tokens) == request.max_new_tokens:
                return result


def encoder_input(model: PreTrainedModel, seed: int) -> EncoderInput | None:
    """Something for the encoder to read, if the model has one."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    if config.is_encoder_decoder:
        frames = 2 * config.max_source_positions
        features = torch.randn(1, config.num_mel_bins, frames, generator=generator)
        inputs, tokens, at = {"input_features": features}, config.max_source_positions, 0
    elif hasattr(config, "vision_config"):
        vision = config.vision_config
        tiles = vision.max_num_tiles
        pixels = torch.randn(
            1, 1, tiles, 3, vision.image_size, vision.image_size, generator=generator
        )
        inputs = {
            "pixel_values": pixels,
            "aspect_ratio_ids": torch.tensor([[2]]),  # two tiles, one beside the other
            "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
        }
        tokens, at = tiles * model.model.vision_model.num_patches, 5
    else:
        return None
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in inputs.values())).digest()
    return EncoderInput(digest, tokens, inputs, at)


def workload(model: PreTrainedModel) -> list[list[Request]]:
    """Three waves of requests."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(4, VOCABULARY - 4, (count,), generator=generator).tolist()

    clip, other = encoder_input(model, 1), encoder_input(model, 2)
    without = other if model.config.is_encoder_decoder else None
    system = tokens(53)  # no multiple of a page, longer than the windows
    sampled = tokens(37)
    first = [
        Request(system + tokens(20), 8, encoder=clip),
        Request(sampled, 8, seed=3, samples=3, encoder=other),
    ]
    second = [
        Request(system + tokens(9), 8, encoder=clip),
        Request(tokens(5), 12, encoder=without),
        Request(sampled, 6, encoder=other),
    ]
    third = [
        Request(system + tokens(31), 8, encoder=clip),
        Request(system[:40], 8, seed=5, temperature=0.8, encoder=clip),
        Request(tokens(26), 30, encoder=other),
        Request(sampled + tokens(6), 12, encoder=without),
    ]
    # An answer that ends before its time: at the fourth token that this prompt brings forth.
    early = by_default_cache(model, third[0]).tokens[3]
    third.append(Request(third[0].prompt, 20, eos=early, encoder=clip))
    return [first, second, third]


@cache
def case(name: str) -> tuple[PreTrainedModel, list[list[Request]], list[list[Result]]]:
    """A model, its requests, and the answers over its own cache."""
    model = make(name)
    waves = workload(model)
    requests = [request for wave in waves for request in wave]
    expected = [[by_default_cache(model, r, s) for s in range(r.samples)] for r in requests]
    return model, waves, expected


def compare(
    name: str, *, budget_bytes: int = 1 << 22, preempt_after: int = 4, **options
) -> Outcome:
    """Serves the workload; after `preempt_after` steps of the last wave the longest request is
    preempted once."""
    model, waves, expected = case(name)
    begin = None  # of the last wave, in steps

    def on_step(engine: Engine) -> None:
        if begin is None or engine.report.steps < begin + preempt_after:
            return
        if engine.running and not engine.report.preemptions:
            engine.preempt(max(engine.running, key=lambda live: live.last_position))

    settings = (
        dict(page_tokens=PAGE_TOKENS, chunk=24, record_logits=True, on_step=on_step) | options
    )
    with Engine(model, budget_bytes=budget_bytes, **settings) as engine:
        results = []
        for number, wave in enumerate(waves):
            if number == len(waves) - 1:
                begin = engine.report.steps
            results += engine.generate(wave)
            engine.manager.audit()
        live = engine.manager.stats().pool.leaves
        assert all(leaf.live == 0 for leaf in live.values()), (
            "blocks are left after the last request"
        )
    requests = [request for wave in waves for request in wave]
    preempted = sum(x.preemptions for of in results for x in of)
    return Outcome(name, engine.report, requests, results, expected, preempted)
